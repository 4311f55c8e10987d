# client: lm-evaluation-harness
# pip: lm-eval[api]==0.4.13
"""Compare a multiple-choice task's scores with those of transformers on the same weights."""

import json
import os
import site
from pathlib import Path

# PyTorch and transformers, of which the environment has none, are those of the exporter.
for folder in os.environ["EXPORTER_PATH"].split(os.pathsep):
    site.addsitedir(folder)
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

import lm_eval  # noqa: E402

from steps import TEXT, same, step  # noqa: E402

HERE = Path(__file__).parent
CHOICES = 4  # the answer to a question, and those to the next ones
TOKENIZER = HERE / "tokenizer"
TASK = {
    "task": "answers",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(HERE / "answers.json")}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}


def write_questions():
    """Write the questions and answers of the dialogues."""
    lines = Path(os.environ["DIALOGUES"]).read_text("utf-8").splitlines()
    texts = [message["content"] for line in lines for message in json.loads(line)]
    questions, answers = texts[::2], texts[1::2]
    with (HERE / "answers.json").open("w") as file:
        for i, question in enumerate(questions):
            choices = [answers[(i + j) % len(answers)] for j in range(CHOICES)]
            fields = {"question": question, "choices": choices, "answer": 0}
            file.write(json.dumps(fields) + "\n")


def write_tokenizer():
    """Write the bundle's tokenizer as transformers reads it."""
    bundle = Path(os.environ["BUNDLE"])
    TOKENIZER.mkdir()
    (TOKENIZER / "tokenizer.json").write_bytes((bundle / "tokenizer.json").read_bytes())
    special_tokens = json.loads((bundle / "bundle.json").read_text("utf-8"))["special_tokens"]
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | special_tokens
    (TOKENIZER / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")


def score(backend, **options):
    """Return lm-eval's results and the log-likelihoods of all choices, in order."""
    options |= {"tokenizer": str(TOKENIZER), "max_length": 1024}
    evaluation = lm_eval.simple_evaluate(backend, model_args=options, tasks=[TASK])
    samples = sorted(evaluation["samples"]["answers"], key=lambda sample: sample["doc_id"])
    values = [float(value) for sample in samples for ((value, _),) in sample["resps"]]
    return evaluation["results"]["answers"], values


def score_served(url):
    address = f"{url}/v1/completions"
    return score("local-completions", model="smollm2", base_url=address, num_concurrent=2)


write_questions()
write_tokenizer()
gguf = Path(os.environ["GGUF"])
results, values = {}, {}
options = {"pretrained": str(gguf.parent), "gguf_file": gguf.name, "dtype": "float32"}
results["transformers"], values["transformers"] = score(
    "hf", device="cpu", batch_size=20, **options
)
results["float32"], values["float32"] = score_served(os.environ["FLOAT_URL"])
results["int8"], values["int8"] = score_served(TEXT)
accuracies = [f"{name} {result['acc_norm,none']:.3f}" for name, result in results.items()]
error = results["transformers"]["acc_norm_stderr,none"]
count = len(values["transformers"]) // CHOICES


@step(f"answers to {count} questions: {', '.join(accuracies)} (standard error {error:.3f})")
def _():
    pairs = zip(values["float32"], values["transformers"], strict=True)
    assert max(abs(a - b) for a, b in pairs) < 0.01
    for metric in ("acc", "acc_norm"):
        reference = results["transformers"][f"{metric},none"]
        error = results["transformers"][f"{metric}_stderr,none"]
        same(results["float32"][f"{metric},none"], reference)
        assert abs(results["int8"][f"{metric},none"] - reference) <= error
