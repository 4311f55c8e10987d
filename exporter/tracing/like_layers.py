"""Which layers of a model compute the same with weights of their own, seen in one recorded pass.

Layers are alike if they make the same calls of PyTorch's operators, with the same numbers, on the
same values: their own parameters and cache, what the layer before left, and what is made once for
all layers. Nothing is computed for it: tensors are fake ones, which have shapes alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..private import FakeTensor, FakeTensorMode, TorchDispatchMode, tree_leaves, tree_map
from .geometry import Geometry
from .tracing import example

Forward = Callable[[torch.Tensor, torch.Tensor, list[torch.Tensor]], tuple[torch.Tensor, ...]]


class UnlikeError(Exception):
    """The layers are not a chain of blocks that can be told apart; it says why."""


@dataclass(frozen=True)
class LikeLayers:
    """The layers of a model, and for each the first that it is like.

    `tensors` are a layer's parameters and buffers by their names in it, as they are in a pass;
    `names` are the model's. `hidden` is the argument, by place or name, in which a layer gets what
    the one before returned; `rest` is what it returns beside that, None if it returns that alone.
    """

    name: str
    layers: list[nn.Module]
    tensors: list[dict[str, torch.Tensor]]
    names: list[str]
    first: list[int]
    hidden: int | str
    rest: tuple[Any, ...] | None

    @property
    def kept(self) -> list[int]:
        return sorted({*self.first})


@dataclass
class _Block:
    """What one layer was given, did and returned."""

    given: dict[int | str, Any] = field(default_factory=dict)
    calls: list[tuple[str, Any, Any]] = field(default_factory=list)  # name, arguments, results
    returned: Any = None

    @property
    def output(self) -> torch.Tensor:
        """The tensor that it returned, alone or first of several things that are none."""
        found = _leaves(self.returned)
        if len(found) != 1 or found[0] is not first_of(self.returned):
            raise UnlikeError(f"a layer returns {len(found)} tensors")
        return found[0]


class _Recorder(TorchDispatchMode):
    """Notes every operator's call, in the layer that makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[_Block] = []
        self.inside = False
        self.between = 0  # calls after the first layer that are in none
        self.before: list[Any] = []  # results of calls before the first layer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.inside:
            self.blocks[-1].calls.append((str(func), (args, kwargs or {}), result))
        elif self.blocks:
            self.between += 1
        else:
            self.before.append(result)
        return result

    def watched(self, layer: nn.Module) -> Callable[..., Any]:
        """A layer's forward that says when it begins and ends."""
        forward = layer.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            if self.inside or self.between:
                raise UnlikeError("something is computed between the layers")
            self.blocks.append(_Block(dict([*enumerate(args), *kwargs.items()])))
            self.inside = True
            self.blocks[-1].returned = result = forward(*args, **kwargs)
            self.inside = False
            return result

        return run


def find(model: nn.Module, geometry: Geometry, run: Forward) -> LikeLayers:
    """See which layers of a model are alike in a pass of its Traceable. Raises UnlikeError."""
    name, layers = _list_of(model, len(geometry.layers))
    recorder = _Recorder()
    with FakeTensorMode(allow_non_fake_inputs=True), contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(forwarding(layer, recorder.watched(layer)))
        ids, past_length, caches = example(geometry, torch.device("cpu"))
        with recorder:
            _, *after = run(ids, past_length, caches)
    blocks = recorder.blocks
    if len(blocks) != len(layers):
        raise UnlikeError(f"{len(blocks)} calls of {len(layers)} layers")
    hidden = _hidden(blocks)
    described = [
        _description(i, layers, blocks, hidden, caches, after, recorder.before)
        for i in range(len(layers))
    ]
    rest = blocks[0].returned[1:] if isinstance(blocks[0].returned, tuple) else None
    first = [described.index(text) for text in described]
    tensors = [_tensors(layer) for layer in layers]
    return LikeLayers(name, layers, tensors, list(_tensors(model)), first, hidden, rest)


@contextlib.contextmanager
def forwarding(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a module compute with another function while the context lasts."""
    before = vars(module).get("forward")
    module.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before  # type: ignore[method-assign]


def first_of(returned: Any) -> Any:
    """What a layer hands on: its result, or the first of several."""
    return returned[0] if isinstance(returned, tuple) and returned else returned


def _list_of(model: nn.Module, num_layers: int) -> tuple[str, list[nn.Module]]:
    """The one list of as many different modules as there are layers, and its name."""
    found = {
        name: list(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len({*module}) == len(module) == num_layers
    }
    if len(found) != 1:
        raise UnlikeError(f"{len(found)} lists of {num_layers} layers")
    return next(iter(found.items()))


def _hidden(blocks: list[_Block]) -> int | str:
    """Where each layer gets what the one before returned."""
    places: set[int | str] | None = None
    for before, block in itertools.pairwise(blocks):
        here = {place for place, value in block.given.items() if value is before.output}
        places = here if places is None else places & here
    if places is None or len(places) != 1:
        raise UnlikeError("what a layer returns is not what the next one gets")
    return places.pop()


def _description(
    index: int,
    layers: list[nn.Module],
    blocks: list[_Block],
    hidden: int | str,
    caches: list[torch.Tensor],
    after: list[torch.Tensor],
    before: list[Any],
) -> str:
    """What a layer does, in words that are the same for every layer that does the same."""
    names = {id(t): f"before {i}" for i, t in enumerate(_leaves(before))}
    for i, layer in enumerate(layers):
        where = "own" if i == index else f"layer {i}"
        names |= {id(t): f"{where} {name}" for name, t in _tensors(layer).items()}
        for kind, cache in enumerate(caches[2 * i : 2 * i + 2]):
            names[id(cache)] = f"{where} cache {kind}"
    for i, block in enumerate(blocks[:index]):
        for _, _, result in block.calls:
            names |= {id(t): f"layer {i} inside" for t in _leaves(result)}
    block = blocks[index]
    for number, (_, _, result) in enumerate(block.calls):
        for place, tensor in enumerate(_leaves(result)):
            names.setdefault(id(tensor), f"call {number} result {place}")
    names[id(block.given[hidden])] = "hidden"

    def described(value: Any) -> Any:
        name = _named(value, names) if isinstance(value, torch.Tensor) else repr(value)
        if name.startswith("layer "):
            raise UnlikeError(f"layer {index} reads what is another's: {name}")
        return name

    ends = [block.output, *after[2 * index : 2 * index + 2]]
    told = [(name, tree_map(described, given)) for name, given, _ in block.calls]
    return repr((told, [described(end) for end in ends]))


def _leaves(values: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


def _named(tensor: torch.Tensor, names: dict[int, str]) -> str:
    """A tensor's part in a pass; a constant is known by its numbers."""
    if (name := names.get(id(tensor))) is not None:
        return name
    if isinstance(tensor, FakeTensor) or tensor.is_meta or tensor.nbytes > 1 << 20:
        return f"other {id(tensor)}"
    digest = hashlib.sha256(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return f"constant {tensor.dtype} {list(tensor.shape)} {digest.hexdigest()}"


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, and then buffers, by their names."""
    found: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    return found | dict(module.named_buffers(remove_duplicate=False))
