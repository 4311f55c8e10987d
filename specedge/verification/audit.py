"""Audit of a bundle: its checks in order, the time of each, and the self-test of the checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import numpy as np

from specedge.bundle import MANIFEST, Bundle
from specedge.bundle.integrity import sha256
from specedge.bundle.manifest import ModelEntry, chunk_length
from specedge.errors import DeviceError, MissingExtraError, PromptError, SpecEdgeError
from specedge.runtime.backend.model_session import choose_ops
from specedge.runtime.backend.onnx_model import OrtModel
from specedge.runtime.backend.self_test import exact_device, verify_lengths
from specedge.runtime.backend.sessions import Device
from specedge.runtime.decoding.invariance import longest_invariant
from specedge.runtime.requests.loader import load
from specedge.runtime.requests.pipeline import Pipeline
from specedge.runtime.sampling.source import Source
from specedge.runtime.text.prompts import Prompts, UserPrompt
from specedge.runtime.text.tokenizer import encode, load_tokenizer

from . import decoding_checks, graph_checks, joint_distribution, sampled_text
from .audited_pair import AuditedPair, AuditPrompt, SubstituteDraft, depends_on_rounds
from .batched_check import BatchedCheck
from .budget import Budget
from .defects import BATCHED_DEFECT, DEFECTS, Defect
from .noise import CachedModel
from .report import FAILED, SKIPPED, AuditReport, CheckResult, machine
from .statistics import CONFIDENCE, POWER

# Prompts with predictable and with unpredictable next tokens.
BUILT_IN = (
    "def read_config(path):",
    "The three laws of robotics are",
    "import ",
    "Once upon a time there was a",
    "class Parser:\n    def __init__(self",
    "Question: What is the capital of France?\nAnswer:",
    "1, 1, 2, 3, 5, 8, 13,",
    "In the beginning",
    'raise ValueError("',
    "Der schnelle braune Fuchs springt",
    '{"name": "specedge", "version":',
    "for i in range(10):\n    if i % 2:\n        ",
    "Dear Sir or Madam,\n\n",
    "#include <stdio.h>\n\nint main(",
    "今日は天気が",
    "SELECT name, count(*) FROM",
)
FALSE_ALARM = 1e-6  # probability for the whole audit
PASSES = 20000  # steps of the target; in this time every check reaches its minimum size
# Shares of the remaining time; unused time is available to later checks.
SHARES = {
    "measuring": 0.02,
    "caches": 0.02,
    "self-draft": 0.02,
    "greedy": 0.05,
    "coupled": 0.05,
    "graphs": 0.2,
    "batched": 0.05,
    "joint": 0.3,
}
GREEDY_SHARE, GREEDY_SECONDS = 0.25, 30.0  # a larger share if little time remains
NUM_TESTS = (sampled_text.TESTS + joint_distribution.TESTS) * (len(sampled_text.SETTINGS) + 1) - 1
CONTROL = 0.1  # fraction of a self-test's time
ATTEMPTS = (0.1, 0.3, 1.0)  # shares of the remaining time of a defect
ALPHA = FALSE_ALARM / NUM_TESTS

OnProgress = Callable[[str], None]


@dataclass(frozen=True)
class ExecutionSettings:
    """Devices and graph variant to audit; `draft_device` is None if it is `device`."""

    device: Device = field(default_factory=Device)
    ops: str = "auto"
    draft_device: Device | None = None

    def graph_variant(self, bundle: Bundle, model: ModelEntry) -> str:
        """Return the graph variant that a model runs."""
        return choose_ops(model, self.ops, self.device_of(bundle, model))

    def open(self, bundle: Bundle, model: ModelEntry, ops: str, graph: str = "decoder") -> OrtModel:
        """Open one graph of a model."""
        device = exact_device([model], self.device_of(bundle, model))
        return OrtModel(bundle, model, device, ops, graph)

    def load(self, bundle: Bundle, slots: int, max_length: int) -> Pipeline:
        """Load a bundle with several slots."""
        device = self.device
        draft_device = self.draft_device.name if self.draft_device and bundle.draft else None
        return load(
            *(bundle.folder, device.name, device.threads, device.share_threads),
            *(self.ops, draft_device, slots, max_length),
        )

    def device_of(self, bundle: Bundle, model: ModelEntry) -> Device:
        """Return the device of a model."""
        return (self.draft_device or self.device) if model is bundle.draft else self.device

    @property
    def devices(self) -> str:
        """Names of the devices that models run on."""
        names = (device.name for device in (self.device, self.draft_device) if device)
        return " and ".join(dict.fromkeys(names))


def audit(
    bundle: Bundle,
    settings: ExecutionSettings,
    prompts: Sequence[UserPrompt],
    budget: Budget,
    on_progress: OnProgress = lambda check: None,
    special_tokens: bool = False,
    passes: float = 0,
    on_first_verdict: Callable[[AuditReport], None] = lambda report: None,
) -> AuditReport:
    """Run every check. After a failure of files or graphs, later checks are skipped.

    Deterministic and fast checks come first. Each statistical test is evaluated once, after its
    samples have been drawn, so the order does not affect the false-alarm probability.

    Args:
        bundle: The bundle.
        settings: Devices and graph variant to run.
        prompts: The user's prompts, text or messages, in addition to the built-in ones.
        budget: Time limit.
        on_progress: Called with the name of each check before it runs.
        special_tokens: See `GenerationRequest`.
        passes: Extend the budget to the time of this many steps of the target.
        on_first_verdict: Called with a report of the first checks.

    Raises:
        PromptError: A prompt cannot be continued.
    """
    findings: list[CheckResult] = []
    about = _about(bundle, settings)

    def run(checks: Mapping[str, Check]) -> bool:
        findings.extend(_run_checks(checks, budget, on_progress))
        return findings[-1].status != FAILED

    def report() -> AuditReport:
        return AuditReport(
            about, _with_skipped(findings), _confidence_notes(bundle), budget.clock.used
        )

    if not run({"files": partial(graph_checks.files, bundle)}):
        return report()
    texts = _prompts(bundle, prompts, special_tokens)
    try:
        pair = make_audited_pair(bundle, settings, texts)
        pair.time_passes(budget.clock)
        budget.extend(passes * pair.seconds_per_pass)
        pair.measure(budget.share(SHARES["measuring"]))
    except (DeviceError, MissingExtraError):
        raise
    except SpecEdgeError as error:  # a graph that does not match the manifest, or returns NaN
        findings.append(CheckResult("graphs", FAILED, str(error)))
        return report()
    run(_checks_of(pair, DETERMINISTIC))
    on_first_verdict(AuditReport(about, tuple(findings), (), budget.clock.used))
    measured = {name: getattr(pair, name) for name in ("noise", "seconds_per_pass")}
    del pair  # graphs are compared one at a time
    graph_variant, open_ = partial(settings.graph_variant, bundle), partial(settings.open, bundle)
    if run({"graphs": partial(graph_checks.graphs, bundle, graph_variant, open_)}):
        run({"batched": make_batched_check(bundle, settings, texts).run})
        pair = dataclasses.replace(make_audited_pair(bundle, settings, texts), **measured)
        run(_checks_of(pair, STATISTICAL))
    return report()


def unreadable(folder: Path, error: SpecEdgeError, budget: Budget) -> AuditReport:
    """Return the report of a bundle that cannot be read."""
    findings = _with_skipped([CheckResult("files", FAILED, str(error))])
    return AuditReport({"bundle": str(folder), **machine()}, findings, (), budget.clock.used)


def _with_skipped(findings: list[CheckResult]) -> tuple[CheckResult, ...]:
    names = {finding.check for finding in findings}
    all_names = ("files", *DETERMINISTIC, "graphs", "batched", *STATISTICAL)
    skipped = (name for name in all_names if name not in names)
    return (*findings, *(CheckResult(name, SKIPPED, "an earlier check failed") for name in skipped))


@dataclass(frozen=True)
class SelfTest:
    """Results of the checks on the correct decoder (`control`) and with each injected defect."""

    control: list[CheckResult]
    results: list[tuple[Defect, list[CheckResult]]]

    @property
    def caught(self) -> list[tuple[Defect, list[str]]]:
        """Each defect with the names of the checks that failed."""
        return [
            (defect, [f.check for f in findings if f.status == FAILED])
            for defect, findings in self.results
        ]

    @property
    def num_caught(self) -> int:
        """Number of defects that at least one check detected."""
        return sum(bool(checks) for _, checks in self.caught)

    @property
    def false_alarms(self) -> list[CheckResult]:
        """Checks that failed on the correct decoder."""
        return [finding for finding in self.control if finding.status == FAILED]


def self_test(
    pair: AuditedPair,
    budget: Budget,
    on_progress: OnProgress = lambda check: None,
    batched: BatchedCheck | None = None,
    defects: Sequence[Defect] = DEFECTS,
) -> SelfTest:
    """Run the decoding checks without a defect, then with each defect until one check fails.

    Each defect gets little time first, then more; unused time is available to later defects. The
    defect of shared passes is injected where requests share passes.
    """
    pair.time_passes(budget.clock)
    control = _loop_checks(pair, budget.share(CONTROL), on_progress, "no defect: ")
    results: list[tuple[Defect, list[CheckResult]]] = []
    if batched is not None:
        control += _run_checks({"batched": batched.run}, budget, on_progress, "no defect: ")
        if control[-1].status != SKIPPED:
            run = {"batched": partial(batched.run, parts=BATCHED_DEFECT.parts)}
            findings = _run_checks(run, budget, on_progress, f"{BATCHED_DEFECT.name}: ")
            results.append((BATCHED_DEFECT, findings))
    for i, defect in enumerate(defects):
        defective = dataclasses.replace(pair, parts=defect.parts)
        share = budget.share(1 / (len(defects) - i))
        for fraction in ATTEMPTS:
            time = share.share(fraction)
            findings = _loop_checks(
                defective, time, on_progress, f"{defect.name}: ", until_caught=True
            )
            if findings[-1].status == FAILED:
                break
        results.append((defect, findings))
    return SelfTest(control, results)


Check = Callable[[Budget], CheckResult]
PairCheck = Callable[[AuditedPair, Budget], CheckResult]
DETERMINISTIC: dict[str, PairCheck] = {
    "caches": decoding_checks.caches,
    "self-draft": decoding_checks.self_draft,
    "greedy": decoding_checks.greedy,
    "coupled": decoding_checks.coupled,
}
STATISTICAL: dict[str, PairCheck] = {
    "joint": partial(joint_distribution.joint, settings=sampled_text.SETTINGS, alpha=ALPHA),
    "sampled": partial(sampled_text.sampled, settings=sampled_text.SETTINGS, alpha=ALPHA),
}


def make_audited_pair(
    bundle: Bundle, settings: ExecutionSettings, prompts: list[AuditPrompt]
) -> AuditedPair:
    """Load the models, self-test the target as `load` does, and add the prompts."""
    target, draft = _open(bundle, settings)
    tolerance = max(
        graph_checks.allowed(model, settings.graph_variant(bundle, model))
        for model in bundle.models.values()
    )
    longest = chunk_length(bundle.target.capacity)
    first = longest_invariant(target.invariant_lengths, longest)
    sizes = {"target": bundle.target, "draft": bundle.draft or bundle.target}
    k, readings = bundle.num_draft_tokens, bundle.readings()
    return AuditedPair(target, draft, sizes, k, tolerance, prompts, first, readings=readings)


def make_batched_check(
    bundle: Bundle, settings: ExecutionSettings, prompts: Sequence[AuditPrompt]
) -> BatchedCheck:
    """Return the check of requests that share passes, which loads the bundle itself."""
    return BatchedCheck(bundle, settings.ops, partial(settings.load, bundle), prompts)


def _open(bundle: Bundle, settings: ExecutionSettings) -> tuple[OrtModel, CachedModel]:
    """Load the target, self-test it, and load the draft model or a substitute."""
    models = {role: settings.open(bundle, m, settings.ops) for role, m in bundle.models.items()}
    target = models["target"]
    device = settings.device_of(bundle, bundle.target)
    verify_lengths(target, bundle.target, device, bundle.num_draft_tokens + 1)
    return target, models.get("draft") or SubstituteDraft(target.with_new_cache())


def built_in_prompts(bundle: Bundle) -> list[AuditPrompt]:
    """Return the built-in prompts, truncated to half the context."""
    return _prompts(bundle, ())


def _loop_checks(
    pair: AuditedPair,
    budget: Budget,
    on_progress: OnProgress,
    prefix: str = "",
    until_caught: bool = False,
) -> list[CheckResult]:
    """Run the decoding checks, all or up to the first that fails."""
    pair.measure(budget.share(SHARES["measuring"]))
    checks = _checks_of(pair, DETERMINISTIC | STATISTICAL)
    return _run_checks(checks, budget, on_progress, prefix, until_caught)


def _checks_of(pair: AuditedPair, checks: Mapping[str, PairCheck]) -> dict[str, Check]:
    return {name: partial(check, pair) for name, check in checks.items()}


def _run_checks(
    checks: Mapping[str, Check],
    budget: Budget,
    on_progress: OnProgress,
    prefix: str = "",
    until_caught: bool = False,
) -> list[CheckResult]:
    """Run checks; one fails if it raises an error because of the bundle."""
    findings: list[CheckResult] = []
    for name, check in checks.items():
        on_progress(prefix + name)
        share = budget.share(_share(name, budget.left))
        try:
            findings.append(check(share))
        except (DeviceError, MissingExtraError):
            raise
        except SpecEdgeError as error:
            findings.append(CheckResult(name, FAILED, str(error)))
        if until_caught and findings[-1].status == FAILED:
            break
    return findings


def _share(check: str, seconds_left: float) -> float:
    """Return the share of the remaining time that a check may take."""
    share = SHARES.get(check, 1.0)
    if check == "greedy":
        share = max(share, min(GREEDY_SHARE, GREEDY_SECONDS / max(seconds_left, 1e-9)))
    return share


def _prompts(
    bundle: Bundle, prompts: Sequence[UserPrompt], special_tokens: bool = False
) -> list[AuditPrompt]:
    """Tokenize the user's prompts, and the built-in ones, truncated to half the context."""
    tokenizer, encoder = load_tokenizer(bundle), bundle.target.encoder
    encoded, audit_prompts = Prompts(bundle, tokenizer), []

    def add(name: str, prompt: Sequence[int] | Source, text: Sequence[int]) -> None:
        tokens, source = encoded.start(prompt)
        later = () if source is None else tuple(text)
        audit_prompts.append(AuditPrompt(name, tuple(tokens), source, later))

    for i, prompt in enumerate(prompts, 1):
        try:
            tokens = encoded.tokens_of(prompt, special_tokens)
            add(f"your prompt {i}", tokens, tokens)
        except PromptError as error:
            raise PromptError(f"prompt {i}: {error}") from error
    most = max(1, (bundle.max_prompt_length + 1) // 2)
    for i, text in enumerate(BUILT_IN):
        if not (tokens := encode(tokenizer, text)[:most]):
            continue
        if encoder is not None and encoder.reads_speech:
            noise = np.random.default_rng(i).standard_normal(encoder.source_shape)
            add(f"noise {i}", Source(noise), tokens)
        else:
            add(repr(text if len(text) < 40 else text[:37] + "..."), tokens, tokens)
    return audit_prompts


def _about(bundle: Bundle, settings: ExecutionSettings) -> dict[str, str]:
    parity = bundle.target.parity
    ops = {role: settings.graph_variant(bundle, model) for role, model in bundle.models.items()}
    used = ", ".join(f"{package} {v}" for package, v in parity[ops["target"]].versions.items())
    ids = {
        role: f"{model.source.id}"
        + (f" at {model.source.revision}" if model.source.revision else "")
        for role, model in bundle.models.items()
    }
    draft_ops = f" (draft {ops['draft']})" if "draft" in ops else ""
    return {
        "bundle": str(bundle.folder),
        "pair": f"target {ids['target']}, draft {ids.get('draft', 'none')}, "
        f"K = {bundle.num_draft_tokens}",
        "identity": f"SHA-256 of {MANIFEST} {sha256(bundle.path(MANIFEST))}",
        "exported": f"by specedge {bundle.specedge_version} with {used}",
        **machine(),
        "run": f"on {settings.devices}, graph variant {ops['target']}{draft_ops}, "
        f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
    }


def _confidence_notes(bundle: Bundle) -> tuple[str, ...]:
    substitute = (
        "the bundle has no draft model: greedy texts use suffix decoding, as requests do, and "
        "sampled texts the target itself with perturbed logits"
    )
    rounds = (
        "distributions of the draft model depend on the rounds, as it reads hidden states of the "
        "target or drafts in one pass: those of sampled are as it returned them, and joint drafts "
        "with the target itself with perturbed logits"
    )
    return (
        *([] if bundle.draft else [substitute]),
        *([rounds] if bundle.draft and depends_on_rounds(bundle.draft) else []),
        "files, graphs, caches, self-draft, greedy, coupled and batched are deterministic, and "
        "cover only the texts that were run",
        f"sampled and joint are {NUM_TESTS} tests; each fails a correct bundle with probability "
        f"about {ALPHA:.1e}, all together {FALSE_ALARM:.0e} (chi-square is an approximation)",
        f"'detectable' is the smallest total variation over the cells that the test detects with "
        f"probability {POWER:.0%}, for any shape of the deviation; smaller ones may go undetected",
        f"'upper bound' is that of the total variation over the cells, with "
        f"{CONFIDENCE:.0%} confidence for each setting",
        "'detectable' of sampled is that of the rank test; --json has that of each test",
        "the distributions are those of the target's graph on this machine; its error against "
        "PyTorch was measured at export only",
        "the random numbers are the same in every audit; the number used depends on the time",
    )
