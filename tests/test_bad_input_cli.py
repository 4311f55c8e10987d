"""Bad input to any command is one line, exit code 1 and no file; under --json the line is JSON."""

import json
import shlex

import pytest

from installed import run
from specedge.bundle import store

LONG = "def read_config(path):" * 1000
REPLAYS = {
    "empty": ("", "not valid JSON"),
    "list": ("[]", "has no 'plan'"),
    "number": ('{"plan": 3}', "replay must be a list"),
    "pair": ('{"plan": [["model", 4]]}', "[drafter, K, number of rounds]"),
    "large": ('{"plan": [["model", 99, 1]]}', "between 0 and 64"),
    "latin": (b"\xff", "not UTF-8"),
    "unknown": ('{"plan": [["tables", 2, 30]]}', "rounds of 'tables'"),
}
FILES = {
    "README.md": "text\n", "prompts.txt": "a\n", "words.txt": "def f(x):\n", "latin": b"a\ncaf\xe9",
    "blank": "\n \n", "empty": "", "long.jsonl": json.dumps({"prompt": "word " * 5000}) + "\n",
    "folder/a": "", **{f"{name}.json": content for name, (content, _) in REPLAYS.items()},
}  # fmt: skip
BUILD = "ngram build words.txt"
BATCH = "generate --prompts prompts.txt --output out"
BAD = [
    ("frobnicate", "frobnicate"),
    ("generate", "PROMPT"),
    ("generate --json", "PROMPT"),
    ("generate ''", "the prompt is empty"),
    ("generate '' --json", "the prompt is empty"),
    ("generate LONG", "shorten it"),
    ("generate x --bundle nowhere", "no bundle at nowhere"),
    ("generate x --bundle nowhere --json", "no bundle at nowhere"),
    ("generate x --colour", "--colour"),
    ("generate x -n 0", "-n"),
    ("generate x -n many", "many"),
    ("generate x --temperature -1", "--temperature"),
    ("generate x --temperature -1 --json", "--temperature"),
    ("generate x --temperature nan", "'nan' is not a number"),
    ("generate x --top-p 0", "--top-p"),
    ("generate x --typical-p 2", "--typical-p"),
    ("generate x --stop ''", "stop string"),
    ("generate x --logit-bias x", "ID=BIAS"),
    ("generate x --logit-bias 5=x", "ID=BIAS"),
    ("generate x --logit-bias 5=1 --logit-bias 5=2", "repeated"),
    ("generate x --logit-bias 5=101", "between -100 and 100"),
    ("generate x --logit-bias -5=1", "at least 0"),
    ("generate x --logit-bias 99999999=1", "token 99999999"),
    ("generate x --bad-word ''", "bad word"),
    ("generate x --lenience 0", "--lenience"),
    ("generate x --coupling maximal", "--coupling"),
    ("generate x --coupling gumbel --lenience 0.5", "lenience"),
    ("generate x --choice 1", "choice applies to coupling 'gumbel'"),
    ("generate x --repetition-penalty inf", "repetition_penalty"),
    ("generate x --min-new-tokens 200", "min_new_tokens 200 is above max_new_tokens 128"),
    ("generate x --logprobs 3", "--logprobs requires"),
    ("generate x -k 65", "65 is not in the range"),
    ("generate x -k many", "'many' is not a valid integer"),
    ("generate x -k 3 --replay x", "excludes --num-draft-tokens"),
    ("generate x --replay none", "No such file"),
    *((f"generate x -n 50 --replay {name}.json", said) for name, (_, said) in REPLAYS.items()),
    ("generate x --drafter oracle", "drafter must be auto, model, lookup"),
    ("generate x --drafter ngram:none", "No such file"),
    ("generate x --drafter ngram:words.txt", "it is damaged or has another format"),
    ("generate x --drafter random --lookup-min 3", "lookup_min applies to suffix decoding"),
    ("generate x --regex '(a'", "regex is rejected by llguidance"),
    ("generate x --regex a --ignore-eos", "omit ignore_eos"),
    ("generate x --json-schema none", "none: No such file"),
    ("generate x --json-schema words.txt", "json_schema is not valid JSON"),
    ("generate x --grammar words.txt", "grammar is rejected by llguidance"),
    ("generate x --grammar words.txt --regex a", "grammar and regex cannot be combined"),
    ("generate x --chat", "python-9m has no chat template; omit --chat"),
    ("generate x --system y", "--system requires --chat"),
    ("generate x --overwrite", "require --prompts"),
    ("generate x --output ''", "require --prompts"),
    ("generate x --resume", "--resume"),
    ("generate x --ray", "--ray requires --prompts"),
    ("generate --prompts prompts.txt --ray-actors 2", "--ray-actors requires --ray"),
    ("generate --prompts prompts.txt --resume", "--resume"),
    ("generate --prompts prompts.txt --output ''", "--output needs a file name"),
    ("generate --prompts none --output out", "No such file"),
    ("generate --prompts latin --output out", "latin, line 2: not UTF-8 text"),
    ("generate --prompts blank --output out", "has no prompts"),
    ("generate --prompts prompts.txt --output folder", "is a folder"),
    ("generate --prompts prompts.txt --output no/out", "does not exist"),
    ("generate --prompts prompts.txt --output prompts.txt --overwrite", "is also an input"),
    (f"{BATCH} --overwrite --resume", "--resume"),
    (f"{BATCH} --bundle nowhere", "no bundle at nowhere"),
    (f"{BATCH} --temperature nan", "temperature"),
    (f"{BATCH} --json", "single PROMPT"),
    (f"{BATCH} x", "either PROMPT or --prompts"),
    ("compare '' --repeats 1", "the prompt is empty"),
    ("compare x --drafter chain --lookup-max 0", "--lookup-max"),
    ("compare x --system y", "--system requires --chat"),
    ("compare x --chat --system y --repeats 1 -n 2", "has no chat template"),
    ("inspect --bundle README.md", "README.md"),
    ("inspect --json --bundle README.md", "README.md"),
    ("inspect --memory --device abacus", "device must be"),
    *((f"bench -k {k}", "must be a number or a range") for k in ("0", "4-2", "65", "1,,2", "1-")),
    ("bench -k -3", "'-3' must be a number or a range"),
    ("bench --drafter oracle", "drafter must be"),
    ("bench --drafter ngram:nowhere", "nowhere"),
    ("bench --set poems", "poems"),
    ("bench --format text", "--format requires --prompts"),
    ("bench --prompts nowhere.txt", "nowhere.txt"),
    ("bench --temperature nan", "temperature"),
    ("bench --html .", "specify a file for --html"),
    ("bench --csv no/where.csv", "does not exist"),
    ("bench --csv ''", "--csv needs a file name"),
    ("bench --csv one --html one", "specify two"),
    ("verify --bundle nowhere", "no bundle at nowhere"),
    ("verify --device abacus", "device must be one of"),
    ("verify --threads 4096", "threads"),
    ("verify --threads 1 --device cuda", "both run on cuda; leave threads out"),
    ("verify --minutes 0", "--minutes"),
    ("verify --minutes nan", "'nan' is not a number"),
    ("verify --prompts none.txt", "none.txt"),
    ("verify --prompts blank", "has no prompts"),
    ("verify --prompts long.jsonl", "prompt 1: the prompt has"),
    ("verify --format text", "--format requires --prompts"),
    ("verify --self-test --prompts README.md", "excludes --prompts"),
    ("ngram build --output out", "TEXT"),
    (BUILD, "--output"),
    ("ngram build none --output out", "none: No such file"),
    ("ngram build folder --output out", "Is a directory"),
    (f"{BUILD} latin --output out", "latin, line 2: not UTF-8 text"),
    ("ngram build empty --output out", "the texts have no tokens"),
    (f"{BUILD} --output folder", "is a folder; specify a file"),
    (f"{BUILD} --output no/out", "does not exist"),
    (f"{BUILD} --output words.txt --overwrite", "is also an input"),
    (f"{BUILD} --output README.md", "--overwrite"),
    (f"{BUILD} --output out --order 4", "--order"),
    (f"{BUILD} --output out --bundle folder", "bundle.json"),
    ("doctor --device tpu", "'tpu' is not one of"),
    ("doctor --overwrite", "--overwrite requires --report"),
    ("doctor --report no/report.json", "does not exist"),
    ("serve --max-length 513", "max_length must be between 2 and 512, got 513"),
    ("serve --slots 0", "0 is not in the range"),
    ("serve --slots 1000000", "not enough memory for python-9m"),
    ("serve --host no.such.host.invalid", "cannot listen on no.such.host.invalid, port 8000"),
    ("serve --host 0.0.0.0 --port 0", "$SPECEDGE_API_KEY"),
    ("serve --host :: --port 0", "--allowed-host"),
    ("serve --chat-template TOKENIZER", "has no chat template"),
    ("serve --chat-template none.jinja", "does not exist"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the current folder, with the files that commands name."""
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("command", "message"), BAD)
def test_invalid_input_is_one_line_error_and_leaves_no_file(folder, command, message):
    words = {"LONG": LONG, "TOKENIZER": str(store.embedded_folder() / "tokenizer.json")}
    result = run(*(words.get(word, word) for word in shlex.split(command)))
    assert result.returncode in (1, 2)
    if "--json" in command.split():
        (error,) = json.loads(result.stdout).values()
        assert message.lower() in error.lower()
    else:
        assert result.stdout.strip() == ""
    lines = [line for line in result.stderr.splitlines() if not line.startswith(("Usage", "Try"))]
    assert len([line for line in lines if line.strip()]) == 1
    assert message.lower() in result.stderr.lower()
    assert "Traceback" not in result.stderr
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {*FILES}
    assert (folder / "README.md").read_text("utf-8") == FILES["README.md"]
