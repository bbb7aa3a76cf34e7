"""A module in the place of another: its attributes, parameters and names are the other's."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, TypeVar

import torch
from torch import nn

from ..arguments import shown
from ..errors import PolicyError

_log = logging.getLogger(__name__)
#: What both modules share: the same objects, so that a change of one is a change of the other.
_SHARED = (
    *("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
_StandIn = TypeVar("_StandIn", bound="StandIn")
_OLD_PREFIX = "model."  # of the keys of state dicts that were saved before keys were the model's


class _Forward:
    """What calls a stand-in, with the parameters that the ``forward`` of its model has: libraries
    ask for these, and leave out arguments that are not among them."""

    def __init__(self, of: StandIn) -> None:
        self.__self__ = of  # as of a method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__self__._called(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.__self__.unfused.forward)

    def __reduce__(self) -> Any:
        return getattr, (self.__self__, "forward")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__self__._called, name)  # __code__, which torch.export reads


class _Forwards:
    """Gives each stand-in its ``forward``; one that is set on it comes first, as of any module."""

    def __get__(self, of: StandIn | None, kind: type[StandIn]) -> Any:
        return kind._called if of is None else _Forward(of)


class StandIn(nn.Module):
    """A module that stands for the one in evaluation mode which :attr:`unfused` is.

    Parameters, buffers and children are those of ``unfused``, by the same names. Another public
    attribute is looked up there, and set there, if this class has none of that name. Private
    attributes are this module's own.
    """

    unfused: nn.Module
    training: bool

    def __init__(self, unfused: nn.Module) -> None:
        super().__init__()
        self._stand_for(unfused)

    def _stand_for(self, unfused: nn.Module) -> None:
        held = unfused.__dict__
        shared = {name: held[name] for name in _SHARED if name in held}
        self.__dict__.update(shared, unfused=unfused, training=False)

    forward = _Forwards()

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        """Return what ``unfused`` returns for these arguments."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Take the present weights and settings of ``unfused``."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {name: each for name, each in self.__dict__.items() if name not in _SHARED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._stand_for(self.__dict__["unfused"])

    # -- attributes --------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Return what ``unfused`` has under a public name, or the name of a part."""
        mine = type(self).__name__
        unfused = self.__dict__.get("unfused")  # None while a copy is being made
        if unfused is None:
            raise AttributeError(f"'{mine}' object has no attribute '{name}'", name=name)
        theirs = type(unfused).__name__
        if name.startswith("_") and not self._is_part(name):
            text = (
                f"'{mine}' object has no attribute '{name}', and does not pass on private ones of "
                f"the {theirs} that it stands for (unfused.{name})"
            )
            raise AttributeError(text, name=name, obj=self)
        try:
            return getattr(unfused, name)
        except AttributeError as error:
            text = f"'{mine}' object has no attribute '{name}', nor has the {theirs} that it stands"
            raise AttributeError(f"{text} for", name=name, obj=self) from error

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what is this module's own here, and anything else on ``unfused``."""
        if name == "training":
            self.train(value)
        elif name == "unfused":
            raise AttributeError(
                f"'unfused' of a {type(self).__name__} cannot be set; fuse the other model",
                name=name,
            )
        elif self._is_own(name):
            object.__setattr__(self, name, value)
        else:
            setattr(self.unfused, name, value)
            self.refresh()

    def __delattr__(self, name: str) -> None:
        if self._is_own(name):
            object.__delattr__(self, name)
        else:
            delattr(self.unfused, name)
            self.refresh()

    def __dir__(self) -> Iterable[str]:
        theirs = (name for name in dir(self.unfused) if not name.startswith("_"))
        return sorted({*super().__dir__(), *theirs})  # type: ignore[no-untyped-call]

    def _is_part(self, name: str) -> bool:
        held = self.__dict__
        return any(name in held.get(kind, ()) for kind in ("_parameters", "_buffers", "_modules"))

    def _is_own(self, name: str) -> bool:
        if name in self.__dict__ or hasattr(type(self), name):
            return True
        return name.startswith("_") and not self._is_part(name)

    # -- modes, devices, states --------------------------------------------------------------------

    def train(self: _StandIn, mode: bool = True) -> _StandIn:
        """Stay in evaluation mode. Raises :class:`PolicyError` for ``mode=True``."""
        if type(mode) is not bool:
            raise PolicyError(f"mode={shown(mode)}; expected True or False")
        if mode:
            mine, theirs = type(self).__name__, type(self.unfused).__name__
            raise PolicyError(
                f"a {mine} of a {theirs} is for inference: it has no training mode; train the "
                f"{theirs} itself (unfused), also by torch.compile(model, backend='cudnngraph')"
            )
        if _has_modes(self.unfused):
            self.unfused.train(False)
        return self

    def _apply(self: _StandIn, fn: Any, recurse: bool = True) -> _StandIn:
        self.unfused._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.refresh()
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of ``unfused``, under its own keys."""
        return self.unfused.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the state of ``unfused``, and take it from the next call on."""
        if isinstance(state_dict, Mapping):
            state_dict = self._without_prefix(state_dict)
        found = self.unfused.load_state_dict(state_dict, strict, assign)
        self.refresh()
        return found

    def _without_prefix(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """A state under the keys of ``unfused``, which older ones have a prefix before."""
        if not state or any(not key.startswith(_OLD_PREFIX) for key in state):
            return state
        if not state.keys().isdisjoint(self.unfused.state_dict()):
            return state
        return {key.removeprefix(_OLD_PREFIX): each for key, each in state.items()}

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load as a part of another module, which calls this."""
        self.unfused._load_from_state_dict(*args, **kwargs)
        self.refresh()


_torch: Any = torch


def _called_apart(of: StandIn, args: Any, kwargs: Any) -> Any:
    """A call between the graphs of torch.compile."""
    return of._called(*args, **kwargs)


#: As torch.compiler.disable makes it, which imports torch's compiler at once.
called_apart: Any = _torch._disable_dynamo(_called_apart)


def warn_of_gradients(name: str, leaves: Iterable[Any]) -> None:
    """Log once for a model that gradients end in it, if an argument asks for some."""
    if torch.is_grad_enabled() and any(getattr(leaf, "requires_grad", False) for leaf in leaves):
        _warn_of_gradients(name)


@cache
def _warn_of_gradients(name: str) -> None:
    _log.warning(
        "%s: an argument requires a gradient, and results of a fused model have none; for "
        "gradients call the model itself (unfused), or torch.compile(model, backend='cudnngraph')",
        name,
    )


def check_mode(model: Any) -> None:
    """Raise :class:`PolicyError` for what is no module in evaluation mode."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise PolicyError(
            "the model is a DistributedDataParallel, which is for training; expected the model "
            "within: fuse(model.module, ...)"
        )
    if not isinstance(model, nn.Module):
        what = f"the model is a {type(model).__name__}; expected a torch.nn.Module"
        if isinstance(model, torch.export.ExportedProgram):
            what += ": the program's module()"
        elif callable(model) and not isinstance(model, type):
            what += " (for a function: torch.compile(function, backend='cudnngraph'))"
        raise PolicyError(what)
    if model.training and _has_modes(model):
        raise PolicyError("the model is in training mode; call model.eval(), fuse is for use")


def _has_modes(module: nn.Module) -> bool:
    """Whether a module has a training and an evaluation mode. What torch.export gives has not: its
    graph is in the mode in which it was exported."""
    return not (isinstance(module, torch.fx.GraphModule) and "eval" in vars(module))


def first_floating_dtype(module: nn.Module) -> torch.dtype | None:
    """The dtype of the first parameter that floats."""
    found = (each.dtype for each in module.parameters() if each.is_floating_point())
    return next(found, None)
