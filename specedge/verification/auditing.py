"""The whole audit: its checks in turn, the time that each may take, and what they amount to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from specedge.bundle import MANIFEST, Bundle
from specedge.bundle.integrity import sha256
from specedge.bundle.manifest import ModelEntry, chunk_length
from specedge.errors import DeviceError, MissingExtraError, PromptError, SpecEdgeError
from specedge.runtime.backend.model_session import choose_ops
from specedge.runtime.backend.onnx_model import OrtModel
from specedge.runtime.backend.self_test import fitting, settle
from specedge.runtime.backend.sessions import Device
from specedge.runtime.decoding.invariance import longest_held
from specedge.runtime.text.prompts import Prompts, UserPrompt
from specedge.runtime.text.tokenizing import encode, load_tokenizer

from . import graphs, joint, loop, sampled
from .budget import Budget
from .cached import Cached
from .defects import DEFECTS, Defect
from .report import FAILED, SKIPPED, Finding, Report, machine
from .statistics import CONFIDENCE, POWER
from .subject import Prompt, StandIn, Subject
from .texts import BUILT_IN

FALSE_ALARM = 1e-6  # of the whole audit
PASSES = 20000  # steps of the target in whose time every check reaches its least size
# Each takes its share of the time that is left, so what one leaves the next have.
SHARES = {
    "measuring": 0.02,
    "caches": 0.02,
    "self-draft": 0.02,
    "greedy": 0.05,
    "graphs": 0.2,
    "joint": 0.3,
}
GREEDY_SHARE, GREEDY_SECONDS = 0.25, 30.0  # it may take more where little time is left
NUM_TESTS = (sampled.TESTS + joint.TESTS) * (len(sampled.SETTINGS) + 1) - 1
CONTROL = 0.1  # of a self-test's time
LOOKS = (0.1, 0.3, 1.0)  # shares of a defect's time, of what is left of it
ALPHA = FALSE_ALARM / NUM_TESTS

Told = Callable[[str], None]


@dataclass(frozen=True)
class Machinery:
    """How the graphs are run."""

    device: Device = field(default_factory=Device)
    ops: str = "auto"
    draft_device: Device | None = None  # where it is another

    def op_set(self, bundle: Bundle, model: ModelEntry) -> str:
        """The op set of a model that is run."""
        return choose_ops(model, self.ops, self.device_of(bundle, model))

    def open(self, bundle: Bundle, model: ModelEntry, ops: str, graph: str = "decoder") -> OrtModel:
        """One graph, loaded."""
        device = fitting([model], self.device_of(bundle, model))
        return OrtModel(bundle, model, device, ops, graph)

    def device_of(self, bundle: Bundle, model: ModelEntry) -> Device:
        """Where a model is run."""
        return (self.draft_device or self.device) if model is bundle.draft else self.device

    @property
    def devices(self) -> str:
        """The names of what models run on."""
        names = (one.name for one in (self.device, self.draft_device) if one)
        return " and ".join(dict.fromkeys(names))


def audit(
    bundle: Bundle,
    machinery: Machinery,
    prompts: Sequence[UserPrompt],
    budget: Budget,
    told: Told = lambda check: None,
    special_tokens: bool = False,
    passes: float = 0,
    on_first_verdict: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Run every check. A check that finds damage fails; the rest is then not run if it cannot be.

    What is sure and quick comes first: a damaged file, a cache that falls out of step or a greedy
    text that is not the target's shows before the statistical tests begin. Each of those is
    evaluated once, when its samples are drawn, so the order changes no false-alarm bound.

    Args:
        prompts: The user's, text or messages, beside the built-in ones.
        budget: Time to take.
        special_tokens: As of `Request`.
        passes: Extend the budget to the time of so many steps of the target.
        on_first_verdict: Called with a report of the first checks.

    Raises:
        PromptError: A prompt cannot be continued.
    """
    findings: list[Finding] = []
    about = _about(bundle, machinery)

    def step(name: str, run: Callable[[], Finding]) -> bool:
        told(name)
        findings.append(_guarded(name, run))
        return findings[-1].status != FAILED

    def report() -> Report:
        return Report(about, _with_skipped(findings), _sureness(bundle), budget.clock.used)

    if not step("files", lambda: graphs.files(bundle, budget)):
        return report()
    texts = _prompts(bundle, prompts, special_tokens)
    try:
        subject = make_subject(bundle, machinery, texts)
        subject.time_passes(budget.clock)
        budget.extend(passes * subject.seconds_per_pass)
        subject.measure(budget.share(SHARES["measuring"]))
    except (DeviceError, MissingExtraError):
        raise
    except SpecEdgeError as error:  # a graph that is not as the manifest says, or gives NaN
        findings.append(Finding("graphs", FAILED, str(error)))
        return report()
    findings += _checks(CERTAIN, subject, budget, told)
    on_first_verdict(Report(about, tuple(findings), (), budget.clock.used))
    measured = {name: getattr(subject, name) for name in ("noise", "seconds_per_pass")}
    del subject  # graphs are compared one at a time
    share = budget.share(SHARES["graphs"])
    if step("graphs", lambda: graphs_of(bundle, machinery, share)):
        subject = dataclasses.replace(make_subject(bundle, machinery, texts), **measured)
        findings += _checks(DRAWN, subject, budget, told)
    return report()


def graphs_of(bundle: Bundle, machinery: Machinery, budget: Budget) -> Finding:
    """The check of the graphs; one that cannot be loaded or run has failed it."""
    open_ = partial(machinery.open, bundle)
    op_set = partial(machinery.op_set, bundle)
    return _guarded("graphs", lambda: graphs.graphs(bundle, op_set, open_, budget))


def unreadable(folder: Path, error: SpecEdgeError, budget: Budget) -> Report:
    """The report on a bundle that cannot be read."""
    findings = _with_skipped([Finding("files", FAILED, str(error))])
    return Report({"bundle": str(folder), **machine()}, findings, (), budget.clock.used)


def _with_skipped(findings: list[Finding]) -> tuple[Finding, ...]:
    names = {finding.check for finding in findings}
    left = [name for name in ("files", *CERTAIN, "graphs", *DRAWN) if name not in names]
    return (*findings, *(Finding(name, SKIPPED, "an earlier check failed") for name in left))


@dataclass(frozen=True)
class SelfTest:
    """What the checks made of the loop as it is, `control`, and of each planted defect."""

    control: list[Finding]
    found: list[tuple[Defect, list[Finding]]]

    @property
    def caught(self) -> list[tuple[Defect, list[str]]]:
        """Each defect with the names of the checks that failed on it."""
        return [
            (defect, [f.check for f in findings if f.status == FAILED])
            for defect, findings in self.found
        ]

    @property
    def num_caught(self) -> int:
        """Defects that at least one check failed on."""
        return sum(bool(checks) for _, checks in self.caught)

    @property
    def false_alarms(self) -> list[Finding]:
        """Checks that failed on the loop as it is."""
        return [finding for finding in self.control if finding.status == FAILED]


def self_test(
    subject: Subject,
    budget: Budget,
    told: Told = lambda check: None,
    defects: Sequence[Defect] = DEFECTS,
) -> SelfTest:
    """Run the checks of the loop on it as it is, then with each defect planted until one fails: at
    first in little time, then in more. What one does not need of its time, the next have.
    """
    subject.time_passes(budget.clock)
    control = _loop_checks(subject, budget.share(CONTROL), told, "as it is: ")
    found: list[tuple[Defect, list[Finding]]] = []
    for i, defect in enumerate(defects):
        planted = dataclasses.replace(subject, parts=defect.parts)
        share = budget.share(1 / (len(defects) - i))
        for look in LOOKS:
            time = share.share(look)
            findings = _loop_checks(planted, time, told, f"{defect.name}: ", until_caught=True)
            if findings[-1].status == FAILED:
                break
        found.append((defect, findings))
    return SelfTest(control, found)


Check = Callable[[Subject, Budget], Finding]
CERTAIN: dict[str, Check] = {  # no chance is in them
    "caches": loop.caches,
    "self-draft": loop.self_draft,
    "greedy": loop.greedy,
}
DRAWN: dict[str, Check] = {
    "joint": lambda subject, budget: joint.joint(subject, budget, sampled.SETTINGS, ALPHA),
    "sampled": lambda subject, budget: sampled.sampled(subject, budget, sampled.SETTINGS, ALPHA),
}


def make_subject(bundle: Bundle, machinery: Machinery, prompts: list[Prompt]) -> Subject:
    """Both models loaded, with the prompts to try them on; the target tested as `load` does."""
    target, draft = _open(bundle, machinery)
    tolerance = max(
        graphs.allowed(model, machinery.op_set(bundle, model)) for model in bundle.models.values()
    )
    longest = chunk_length(bundle.target.cache.capacity)
    first = longest_held(target.invariant_lengths, longest)
    sizes = {"target": bundle.target, "draft": bundle.draft or bundle.target}
    return Subject(target, draft, sizes, bundle.num_draft_tokens, tolerance, prompts, first)


def _open(bundle: Bundle, machinery: Machinery) -> tuple[OrtModel, Cached]:
    """Load the target and its draft model, or what stands in for one; test the target."""
    models = {role: machinery.open(bundle, m, machinery.ops) for role, m in bundle.models.items()}
    target = models["target"]
    device = machinery.device_of(bundle, bundle.target)
    settle(target, bundle.target, device, bundle.num_draft_tokens + 1)
    return target, models.get("draft") or StandIn(target.twin())


def built_in_prompts(bundle: Bundle) -> list[Prompt]:
    """The prompts of every audit, no longer than the contexts allow."""
    return _prompts(bundle, ())


def _loop_checks(
    subject: Subject, budget: Budget, told: Told, what: str = "", until_caught: bool = False
) -> list[Finding]:
    """All checks of the loop, or those up to the first that fails."""
    subject.measure(budget.share(SHARES["measuring"]))
    return _checks(CERTAIN | DRAWN, subject, budget, told, what, until_caught)


def _checks(
    checks: Mapping[str, Check],
    subject: Subject,
    budget: Budget,
    told: Told,
    what: str = "",
    until_caught: bool = False,
) -> list[Finding]:
    findings: list[Finding] = []
    for name, check in checks.items():
        told(what + name)
        share = budget.share(_share(name, budget.left))
        findings.append(_guarded(name, partial(check, subject, share)))
        if until_caught and findings[-1].status == FAILED:
            break
    return findings


def _share(check: str, seconds_left: float) -> float:
    """Return the part of the time left that a check may take."""
    share = SHARES.get(check, 1.0)
    if check == "greedy":
        share = max(share, min(GREEDY_SHARE, GREEDY_SECONDS / max(seconds_left, 1e-9)))
    return share


def _guarded(name: str, run: Callable[[], Finding]) -> Finding:
    """A check that cannot be run for what the bundle is has failed."""
    try:
        return run()
    except (DeviceError, MissingExtraError):
        raise
    except SpecEdgeError as error:
        return Finding(name, FAILED, str(error))


def _prompts(
    bundle: Bundle, prompts: Sequence[UserPrompt], special_tokens: bool = False
) -> list[Prompt]:
    """The user's prompts, then the built-in ones; of these as much as the context leaves room."""
    encoder = load_tokenizer(bundle)
    encoded, made = Prompts(bundle, encoder), []
    for i, prompt in enumerate(prompts, 1):
        try:
            tokens = encoded.tokens_of(prompt, special_tokens)
        except PromptError as error:
            raise PromptError(f"prompt {i}: {error}") from error
        made.append(Prompt(f"your prompt {i}", tuple(tokens)))
    most = max(1, bundle.context_length // 2)
    for text in BUILT_IN:
        if tokens := encode(encoder, text)[:most]:
            made.append(Prompt(repr(text if len(text) < 40 else text[:37] + "..."), tuple(tokens)))
    return made


def _about(bundle: Bundle, machinery: Machinery) -> dict[str, str]:
    parity = bundle.target.parity
    ops = {role: machinery.op_set(bundle, model) for role, model in bundle.models.items()}
    used = ", ".join(f"{package} {v}" for package, v in parity[ops["target"]].versions.items())
    ids = {
        role: f"{model.source.id}"
        + (f" at {model.source.revision}" if model.source.revision else "")
        for role, model in bundle.models.items()
    }
    own = f" (draft {ops['draft']})" if "draft" in ops else ""
    return {
        "bundle": str(bundle.folder),
        "pair": f"target {ids['target']}, draft {ids.get('draft', 'none')}, "
        f"K = {bundle.num_draft_tokens}",
        "identity": f"SHA-256 of {MANIFEST} {sha256(bundle.path(MANIFEST))}",
        "exported": f"by specedge {bundle.specedge_version} with {used}",
        **machine(),
        "run": f"on {machinery.devices}, op set {ops['target']}{own}, "
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    }


def _sureness(bundle: Bundle) -> tuple[str, ...]:
    stand_in = (
        "the bundle has no draft model: greedy texts are drafted by suffix decoding, as requests "
        "are, and drawn ones by the target itself with other logits"
    )
    return (
        *([] if bundle.draft else [stand_in]),
        "files, graphs, caches, self-draft and greedy are comparisons: no chance is in them, and "
        "they say nothing of texts that were not tried",
        f"sampled and joint are {NUM_TESTS} tests; each fails an honest bundle with probability "
        f"about {ALPHA:.1e}, all together {FALSE_ALARM:.0e}: chi-square is a limit distribution",
        f"'would catch' is the smallest total variation over the cells that the test finds with "
        f"probability {POWER:.0%}, whatever its shape; smaller ones may go unseen",
        f"'at most off' is what the total variation over the cells cannot exceed, with "
        f"{CONFIDENCE:.0%} confidence for each setting",
        "'would catch' of sampled is of the places by rank; the facts of --json have that of each "
        "test",
        "the distributions are those of the target's graph on this machine; how far that is from "
        "PyTorch's was measured at export alone",
        "the random numbers are the same in every audit; how many are used depends on the time",
    )
