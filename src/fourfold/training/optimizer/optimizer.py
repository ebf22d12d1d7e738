"""AdamW (Loshchilov and Hutter, 2019) and SGD over flat shards, or over a plain model's parameters.

One class serves both: the sharded run steps a few flat tensors with torch's fused kernels, the serial reference steps
every parameter on its own with torch's plain loop. They share options, groups and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fourfold.training.optimizer.options import OptimizerError, OptimizerOptions
from fourfold.training.optimizer.rate import learning_rate

DECAY, PLAIN, FROZEN = "decay", "plain", "frozen"
"""The groups: decayed, not decayed, not trained."""


class Shard(Protocol):
    """What the optimizer needs of a shard: a flat parameter, and the group it belongs to."""

    @property
    def parameter(self) -> nn.Parameter:
        """Flat [numel]."""
        ...

    @property
    def group(self) -> str:
        """One of DECAY, PLAIN, FROZEN."""
        ...


def group_of(name: str, parameter: Tensor) -> str:
    """The optimizer group of a logical parameter, by its logical shape: matrices and embeddings decay, vectors not."""
    if not parameter.requires_grad:
        return FROZEN
    return DECAY if parameter.ndim >= 2 else PLAIN


class Optimizer:
    """Parameters in two groups and their state.

    Attributes:
        options: as given.
        state_names: names of the state tensors that have their parameter's shape; AdamW keeps a scalar "step" as well.
    """

    def __init__(self, options: OptimizerOptions, members: Sequence[tuple[nn.Parameter, str]], *, fused: bool) -> None:
        """Take the parameters and allocate their state (zero, as torch would at the first step).

        Args:
            options: which optimizer.
            members: (parameter, group) in an order that is the same for every run of one plan.
            fused: torch's fused kernels; False: torch's plain loop.

        Raises:
            OptimizerError: a group that does not exist.
        """
        for _, group in members:
            if group not in (DECAY, PLAIN, FROZEN):
                raise OptimizerError(f"optimizer group: expected decay, plain or frozen, found {group!r}")
        self.options = options
        self._fused = fused
        self.parameters = [parameter for parameter, group in members if group != FROZEN]
        self._torch = _torch_optimizer(options, members, fused) if self.parameters else None
        self.state_names = _STATES[options.name] if options.name == "adamw" or options.momentum else ()
        for parameter in self.parameters:
            self._allocate(parameter)

    def rate(self, step: int) -> float:
        """The learning rate of optimizer step `step`."""
        return learning_rate(self.options, step)

    def step(self, lr: float, scale: float = 1.0) -> None:
        """Update every parameter from its `.grad` times `scale`, at learning rate `lr`; `.grad` is left scaled.

        A parameter that no row of this step reached counts as one whose gradient is zero, not as absent: weight decay
        and moments go on, in the flat shard as in the serial reference.
        """
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self._torch is not None:
            for group in self._torch.param_groups:
                group["lr"] = lr
            self._scale(self._torch, scale)
            self._torch.step()

    def _scale(self, optimizer: torch.optim.Optimizer, scale: float) -> None:
        """Fused kernels divide as they go, by the attributes that torch's GradScaler sets: one pass less.

        They take the divisor in fp32, which is too coarse for gradients in fp64.
        """
        divisor: Tensor | None = None
        if scale != 1.0 and self._fused and all(parameter.dtype == torch.float32 for parameter in self.parameters):
            divisor = torch.tensor(1 / scale, device=self.parameters[0].device)
        elif scale != 1.0:
            for parameter in self.parameters:
                assert parameter.grad is not None
                parameter.grad.mul_(scale)
        setattr(optimizer, "grad_scale", divisor)  # noqa: B010 - torch declares neither
        setattr(optimizer, "found_inf", None if divisor is None else torch.zeros_like(divisor))  # noqa: B010

    def zero_grad(self) -> None:
        """Make every gradient zero, in place: a shard's is a view of the arena that the ranks' sums arrive in."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()

    def state_dict(self) -> list[dict[str, Tensor]]:
        """The live state tensors of each trained parameter, in the order of the members: nothing is copied."""
        return [dict(self._state(parameter)) for parameter in self.parameters]

    def load_state_dict(self, states: Sequence[dict[str, Tensor]]) -> None:
        """Copy states in, in place.

        Raises:
            OptimizerError: another number of parameters, other names or other shapes.
        """
        if len(states) != len(self.parameters):
            raise OptimizerError(f"optimizer state: expected {len(self.parameters)} entries, found {len(states)}")
        for index, (parameter, state) in enumerate(zip(self.parameters, states, strict=True)):
            mine = self._state(parameter)
            if mine.keys() != state.keys():
                expected, found = (", ".join(names) or "nothing" for names in (mine, state))
                raise OptimizerError(
                    f"optimizer state {index}: expected {expected}, found {found}; "
                    f"was it written by another optimizer than {self.options.name!r}?"
                )
            for name, tensor in mine.items():
                if tensor.shape != state[name].shape:
                    expected, found = tuple(tensor.shape), tuple(state[name].shape)
                    raise OptimizerError(f"optimizer state {index}: {name}: expected shape {expected}, found {found}")
                tensor.copy_(state[name])

    def _state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        return self._torch.state[parameter] if self._torch is not None else {}

    def _allocate(self, parameter: nn.Parameter) -> None:
        """Zeros from the start. Equal to torch's first step: with no dampening 0·momentum + g is g."""
        state = self._state(parameter)
        for name in self.state_names:
            state[name] = torch.zeros_like(parameter, requires_grad=False, memory_format=torch.preserve_format)
        if self.options.name == "adamw":
            # Fused kernels want the step beside the parameter, torch's plain loop wants it on the CPU.
            device = parameter.device if self._fused else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)


def build(options: OptimizerOptions, shards: Iterable[Shard]) -> Optimizer:
    """The optimizer of a placed model: fused kernels on flat shards."""
    return Optimizer(options, [(shard.parameter, shard.group) for shard in shards], fused=True)


def build_plain(options: OptimizerOptions, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    """The optimizer of the serial reference: torch's plain loop, parameter by parameter, by the same options.

    Args:
        options: which optimizer.
        named_parameters: what `model.named_parameters()` gives; a tied weight comes once.
    """
    members = [(parameter, group_of(name, parameter)) for name, parameter in named_parameters]
    return Optimizer(options, members, fused=False)


_STATES = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


def _torch_optimizer(
    options: OptimizerOptions, members: Sequence[tuple[nn.Parameter, str]], fused: bool
) -> torch.optim.Optimizer:
    decays = {DECAY: options.weight_decay, PLAIN: 0.0}
    groups: list[dict[str, Any]] = []
    for name, decay in decays.items():
        parameters = [parameter for parameter, group in members if group == name]
        if parameters:
            groups.append({"params": parameters, "weight_decay": decay})
    kernels: dict[str, Any] = {"fused": True} if fused else {"fused": False, "foreach": False}
    if options.name == "adamw":
        return torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps, **kernels)
    return torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum, **kernels)
