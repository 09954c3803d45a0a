"""Modules whose weights are on servers: the blocks of a client's model, as users and peft find them.

One rule: a change that can't reach the servers is refused by the attempt itself. A module consists of attributes and of
torch's tables of children, tensors and hooks. So every change of it passes `HollowModule.__setattr__` or a
`ClosedTable`, and these refuse it if servers would not follow. Weights are `HollowTensor`s, with a name and a shape but
no memory. An operator that only reads one computes with its values, read from the checkpoint. An operator that would
change it is refused.

Made by `hollow_blocks`. Knows neither adapters nor the network.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple, Never, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_map

from swarmllm.data_structures import MAX_WHOLE
from swarmllm.errors import ConfigurationError


class ModulePlace(NamedTuple):
    """The words by which an error names a module or weight of a block."""

    of: str
    path: str = ""

    def __truediv__(self, name: str) -> "ModulePlace":
        return ModulePlace(self.of, f"{self.path}.{name}".strip("."))

    def __str__(self) -> str:
        return f"{self.path} of {self.of}" if self.path else self.of


def refuse_change(what: object) -> Never:
    """Refuse a change of a block."""
    raise ConfigurationError(
        f"{what} can't be changed here, because servers keep the blocks as they are: adapt linear modules with peft, "
        "or put modules of your own between slices of model.remote_blocks"
    )


# ---------------------------------------------------------------------- tables


class ClosedTable(OrderedDict[Any, Any]):
    """A module's table of children, tensors or hooks. Asks `check(key, entry, new entry)` before each change."""

    check: Callable[[Any, Any, Any], None] = staticmethod(lambda key, was, now: None)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.check(key, self.get(key), value)
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        self.check(key, self.get(key), None)
        super().__delitem__(key)

    def clear(self) -> None:
        for key in list(self):
            del self[key]


def _guard(module: nn.Module, name: str, check: Callable[[Any, Any, Any], None]) -> None:
    table = ClosedTable(module.__dict__[name])
    table.check = check  # from here on
    module.__dict__[name] = table


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def is_row_hook(hook: Any) -> bool:
    """True if it is peft's hook that tells a layer the adapter of each row: servers are told as well."""
    return isinstance(hook, partial) and "adapter_names" in hook.keywords


def row_names(module: nn.Module | None) -> list[str] | None:
    """The adapter of each row, while peft wants several in one batch and has told this module."""
    hooks: Iterable[Any] = () if module is None else reversed(module._forward_pre_hooks.values())
    return next((list(hook.keywords["adapter_names"]) for hook in hooks if is_row_hook(hook)), None)  # the last


def close_hooks(module: nn.Module, where: ModulePlace) -> None:
    """Have `module` and all modules in it refuse hooks, which would never run.

    Raises:
        ConfigurationError: it has some.
    """

    def check(path: str, _key: Any, _was: Any, hook: Any) -> None:
        if hook is not None and not is_row_hook(hook):
            raise ConfigurationError(
                f"no hook can run in {where / path}, because servers run the blocks: put it on the forward of a whole "
                "block, whose hidden states pass through here"
            )

    for path, part in module.named_modules():
        for name in _HOOKS:
            if not isinstance(hooks := part.__dict__[name], ClosedTable):
                for hook in hooks.values():
                    check(path, None, None, hook)
                _guard(part, name, partial(check, path))


def remove_row_hooks(model: nn.Module) -> None:
    """Remove peft's hooks for the adapters of rows after a failed call.

    peft removes them only after calls that work, so later calls would have these adapters too.
    """
    for module in model.modules():
        for key in [key for key, hook in module._forward_pre_hooks.items() if is_row_hook(hook)]:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def fix_children(module: nn.Module, where: ModulePlace, names: Collection[str] | None = None) -> None:
    """Let only peft replace the children of `module`, or those of these names, by wrapping and unwrapping them."""

    def check(name: str, was: nn.Module | None, child: nn.Module | None) -> None:
        if before is not None:
            before(name, was, child)
        if names is None or name in names:
            if was is None or child is None or _bare(child) is not _bare(was):
                refuse_change(where / name)
            close_hooks(child, where / name)

    before = getattr(module._modules, "check", None)
    _guard(module, "_modules", check)


def _bare(module: nn.Module) -> nn.Module:
    """The module without what peft has put around it."""
    bare: nn.Module = getattr(module, "get_base_layer", lambda: getattr(module, "original_module", module))()
    return bare


# ---------------------------------------------------------------------- weights


class HollowTensor(Tensor):
    """A weight of a block as far as it is known here: its place, shape and dtype. It takes no memory.

    Operators that only read it compute with its values; operators that would change it are refused.
    """

    place: ModulePlace
    read: Callable[[], Tensor] | None
    """Gives the values, if they can be had."""
    is_parameter = True
    train_here: Callable[[], Tensor] | None = None
    """Makes it a parameter here, which is trained in place of the servers'; None: it is too large for that."""
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # dispatch gets all

    @staticmethod
    def like(
        tensor: Tensor, dtype: torch.dtype, place: ModulePlace, read: Callable[[], Tensor] | None = None
    ) -> "HollowTensor":
        """One of the tensor's shape, in `dtype` if the tensor is of floats."""
        dtype = dtype if tensor.is_floating_point() else tensor.dtype
        one: HollowTensor = Tensor._make_wrapper_subclass(HollowTensor, tensor.shape, dtype=dtype)
        one.place, one.read = place, read
        return one

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        sources: dict[int, HollowTensor] = {}

        def value_of(one: Any) -> Any:
            if not isinstance(one, cls):
                return one
            if func._schema.is_mutable or one.read is None:
                one.refuse(func._schema.name.removeprefix("aten::"))
            value = one.read()
            sources[value.untyped_storage().data_ptr()] = one
            return value

        def closed(one: Any) -> Any:
            """A result that shares memory with a value can't be changed either."""
            source = sources.get(one.untyped_storage().data_ptr()) if isinstance(one, Tensor) else None
            return one if source is None else cls.like(one, one.dtype, source.place, lambda: one)

        return tree_map(closed, func(*tree_map(value_of, tuple(args)), **tree_map(value_of, dict(kwargs or {}))))

    def refuse(self, name: str, *_: Any, **__: Any) -> Never:
        """Refuse what can't work without the weight, or would change it."""
        raise ConfigurationError(
            f"{self.place} is not here but on servers, which keep it as it is, so {name} can't work on it: train an "
            "adapter of peft, and neither merge it here (save it: `swarmllm adapters merge` makes a model of it and "
            "its base) nor choose one that changes base weights (PiSSA, OLoRA, LoftQ)"
        )

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Have it trained here, if it is small; it is frozen already."""
        if not requires_grad:
            return self
        return self.refuse("requires_grad_") if self.train_here is None else self.train_here()

    def tolist(self) -> Any:
        """Its numbers."""
        return self.refuse("tolist") if self.read is None else self.read().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<{self.place}, {list(self.shape)} of {self.dtype}, on servers>"


def _refusing(name: str) -> Any:
    return lambda weight, *args, **kwargs: weight.refuse(name, *args, **kwargs)


for _name in (  # memory, copies and gradients are no operators
    *("numpy", "__array__", "data_ptr", "storage", "untyped_storage", "share_memory_", "__dlpack__", "__deepcopy__"),
    *("__reduce_ex__", "register_hook", "retain_grad", "backward"),
):
    setattr(HollowTensor, _name, _refusing(_name))
HollowTensor.data = property(HollowTensor.detach, _refusing("data"))  # type: ignore[assignment]
HollowTensor.requires_grad = property(lambda _: False, HollowTensor.requires_grad_)  # type: ignore[assignment,arg-type]
HollowTensor.is_leaf = property(_refusing("is_leaf"))  # type: ignore[assignment]  # an optimizer asks for it


# ---------------------------------------------------------------------- modules

_HARMLESS = {"training", "gradient_checkpointing", "_gradient_checkpointing_func", "_is_full_backward_hook"}
"""Attributes that torch and transformers set on every module of a model, and that change no result."""


class HollowModule(nn.Module):
    """Mixed into the class of each module of a hollow block."""

    swarm_where: ModulePlace
    swarm_read: Callable[[], nn.Module] | None
    """Reads its block."""

    def __setattr__(self, name: str, value: Any) -> None:
        known = self.__dict__
        if not known:  # torch makes a bare copy for each device of DataParallel
            raise ConfigurationError(
                "blocks on servers can't be copied to several devices: show this program one, by CUDA_VISIBLE_DEVICES"
            )
        if not (
            name in _HARMLESS
            or (name in known and (known[name] is value or _is_same(known[name], value)))
            or (name == "p" and value == 0 and isinstance(self, _DropoutNd))  # servers compute without dropout anyway
            or (isinstance(value, nn.Module) and name in self._modules)  # the table of children decides
        ):
            refuse_change(self.swarm_where / name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        refuse_change(self.swarm_where / name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Nothing new can reach the servers."""
        refuse_change(self.swarm_where / name)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Blocks are frozen already."""
        if requires_grad:
            refuse_change(self.swarm_where)
        return self

    def hollow_tensors(self) -> dict[str, HollowTensor]:
        """Its own weights, by name."""
        return {name: value for name, value in self.__dict__.items() if isinstance(value, HollowTensor)}

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        """Parameters that are trained here, and its weights, if a block and not the whole model is asked."""
        yield from super().parameters(recurse)
        for part in self.modules() if recurse else (self,):
            yield from part.hollow_tensors().values() if isinstance(part, HollowModule) else ()

    def __deepcopy__(self, _memo: Any) -> nn.Module:
        """A real module with these weights, for peft to train as a whole."""
        weights = [one.hollow_tensors().values() for one in self.modules() if isinstance(one, HollowModule)]
        size = sum(weight.numel() for of_one in weights for weight in of_one)
        if not self.swarm_where.path or self.swarm_read is None or size > MAX_WHOLE:
            raise ConfigurationError(
                f"{self.swarm_where} can't be copied, nor trained whole, because its weights are on servers "
                "(modules_to_save and layer_replication of peft do so): train modules outside the blocks, norms, or "
                "adapters of linear modules inside"
            )
        return copy.deepcopy(self.swarm_read().get_submodule(self.swarm_where.path))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name, value in self.hollow_tensors().items():
            if f"{prefix}{name}" in state_dict:
                refuse_change(value.place)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _is_same(known: Any, value: Any) -> bool:
    return isinstance(value, bool | int | float | str) and type(known) is type(value) and bool(known == value)


@cache
def _hollow_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(cls.__name__, (HollowModule, cls), {"__module__": cls.__module__})


def own_parameter(module: Any, name: str, trained: bool) -> nn.Parameter:
    """Make this weight of the module a parameter here, with its values, in the place of the servers'.

    Raises:
        ConfigurationError: there is nothing that it could be read from.
    """
    weight: HollowTensor = module.hollow_tensors()[name]
    if weight.read is None:
        refuse_change(weight.place)
    parameter = nn.Parameter(weight.read().clone(), requires_grad=trained)
    del module.__dict__[name]
    OrderedDict.__setitem__(module._parameters, name, parameter)
    return parameter


def hollow_out(block: nn.Module, name: str, dtype: torch.dtype, read: Callable[[], nn.Module] | None = None) -> None:
    """Turn a block, whose weights may be on the meta device, into a hollow one; `name` is for errors.

    `read` gives the block with its weights.
    """
    close_hooks(block, ModulePlace(name))
    for path, module in list(block.named_modules()):
        where = ModulePlace(name, path)
        for table in ("_parameters", "_buffers"):
            for key, tensor in module.__dict__[table].items():
                one = None if tensor is None else HollowTensor.like(tensor, dtype, where / key)
                module.__dict__[key] = one
                if one is not None and read is not None:
                    one.read = partial(_value, read, path, key)
                if one is not None and table == "_buffers":
                    one.is_parameter = False
                elif one is not None and one.ndim == 1 and read is not None:
                    one.train_here = partial(own_parameter, module, key, True)
            module.__dict__[table] = {}
            _guard(module, table, partial(_take_nothing, where))
        fix_children(module, where)
        module.__dict__["swarm_where"], module.__dict__["swarm_read"] = where, read
        cls: Any = type(module)
        module.__class__ = _hollow_class(cls)


def _take_nothing(where: ModulePlace, key: str, *_: Any) -> Never:
    refuse_change(where / key)


def _value(read: Callable[[], nn.Module], path: str, name: str) -> Tensor:
    value: Tensor = getattr(read().get_submodule(path), name)
    return value.detach()
