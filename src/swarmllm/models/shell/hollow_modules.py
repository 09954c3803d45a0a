"""Refusals of hollow blocks: what one would do to a local block, and can't reach the one on the servers.

Its weights have shapes and no values, so nothing can read, change, merge, copy or optimize them; its modules take no
hooks, no attributes, and no children but what peft wraps around them. Each refusal is raised by the attempt itself.
Made by `hollow_blocks`; knows neither adapters nor the network.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple, Never, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_map

from swarmllm.errors import ConfigurationError

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HARMLESS = {"training", "gradient_checkpointing", "_gradient_checkpointing_func", "_is_full_backward_hook"}
"""Attributes that torch and transformers set on every module of a model, and that change no result."""
_ABOUT_A_TENSOR: Any = {  # not is_leaf, by which an optimizer asks whether it can change a tensor
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "nbytes", "itemsize")),
    *(getattr(Tensor, name).__get__ for name in ("is_meta", "is_cuda", "is_sparse", "is_quantized", "requires_grad")),
    *(getattr(Tensor, name).__get__ for name in ("grad", "grad_fn")),
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "nelement", "stride", "element_size", "__len__")),
    *(getattr(Tensor, name) for name in ("is_floating_point", "is_complex")),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}
MAX_WHOLE = 16 << 20
"""Numbers of a module that is trained as a whole, at most; they travel after each step. Assumed."""
_FREEZING: Any = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]


class ModulePlace(NamedTuple):
    """The words by which an error names a module or weight of a block."""

    of: str
    path: str = ""

    def __truediv__(self, name: str) -> "ModulePlace":
        return ModulePlace(self.of, f"{self.path}.{name}".strip("."))

    def __str__(self) -> str:
        return f"{self.path} of {self.of}" if self.path else self.of


class HollowTensor(Tensor):
    """A weight of a block as far as it is known here: where it is, its shape and its dtype.

    Who reads it gets its values, from the checkpoint; nobody can change it.
    """

    place: ModulePlace
    is_parameter = True
    read: Callable[[], Tensor] | None = None
    train_here: Callable[[], Tensor] | None = None
    """Makes it a parameter here, to be trained in the place of the servers'; None: it is too large for that."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse everything that needs a value."""
        kwargs = kwargs or {}
        if func in _ABOUT_A_TENSOR:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _FREEZING and [*args[1:], *kwargs.values()] == [False]:
            return args[0]
        if func in _FREEZING and [*args[1:], *kwargs.values()] in ([True], []) and args[0].train_here is not None:
            return args[0].train_here()
        given = [part for value in (*args, *kwargs.values()) for part in _flat(value)]
        if _only_reads(func, kwargs) and all(one.read for one in given if isinstance(one, cls)):
            return _of_values(func, args, kwargs)
        where = next((tensor.place for tensor in given if isinstance(tensor, cls)), "a weight of a block")
        name = func.__self__.__name__ if func.__name__ in ("__get__", "__set__") else func.__name__
        raise ConfigurationError(
            f"{where} is not here but on servers, which keep it as it is, so {name} can't work on it: train an adapter "
            "of peft, and neither merge it here (save it: `swarmllm adapters merge` makes a model of it and its base) "
            "nor choose one that changes base weights (PiSSA, OLoRA, LoftQ)"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<{self.place}, {list(self.shape)} of {self.dtype}, on servers>"


def _only_reads(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether it neither changes a tensor nor gives away its memory."""
    name = func.__name__
    if name == "__get__":  # an attribute
        return func.__self__ in _READ
    changes = (
        name in ("__set__", "__setitem__", "__delitem__") or name.startswith("__i") or kwargs.get("out") is not None
    )
    return not changes and not (name.endswith("_") and not name.endswith("__")) and name not in _MEMORY


_READ: Any = (Tensor.data, Tensor.T, Tensor.mT, Tensor.H, Tensor.mH, Tensor.real)
_MEMORY = {
    *("numpy", "__array__", "data_ptr", "untyped_storage", "storage", "__dlpack__", "backward", "register_hook"),
    *("retain_grad", "__reduce_ex__", "__deepcopy__", "__cuda_array_interface__", "share_memory"),
}


def _of_values(func: Any, args: Any, kwargs: Any) -> Any:
    """The function of the values; what shares memory with one of them can be changed as little as that one."""
    places: dict[int, HollowTensor] = {}

    def value_of(one: Any) -> Any:
        if not isinstance(one, HollowTensor):
            return one
        assert one.read is not None
        value = one.read()
        places[value.untyped_storage().data_ptr()] = one
        return value

    args, kwargs = tree_map(value_of, (tuple(args), dict(kwargs)))
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)

    def closed(one: Any) -> Any:
        if not isinstance(one, Tensor) or (source := places.get(one.untyped_storage().data_ptr())) is None:
            return one
        view = hollow_tensor(one, one.dtype, source.place)
        view.read = lambda: one
        return view

    return tree_map(closed, result)


def _flat(value: Any) -> Collection[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def hollow_tensor(like: Tensor, dtype: torch.dtype, where: ModulePlace) -> HollowTensor:
    """One of the shape of `like`, in `dtype` if `like` is of floats; takes no memory."""
    one = torch.zeros((), dtype=dtype if like.is_floating_point() else like.dtype)
    tensor = one.expand(like.shape).as_subclass(HollowTensor)
    tensor.place = where
    return tensor


class ClosedTable(OrderedDict[Any, Any]):
    """A module's table of hooks, parameters or buffers that takes no entry."""

    refusal: str

    def __setitem__(self, key: Any, value: Any) -> None:
        if not is_row_hook(value):
            raise ConfigurationError(self.refusal)
        super().__setitem__(key, value)


def is_row_hook(hook: Any) -> bool:
    """Whether it is peft's, by which a layer gets to know the adapter of each row: servers are told as well."""
    return isinstance(hook, partial) and "adapter_names" in hook.keywords


@contextmanager
def rows_of_one_call(model: nn.Module) -> Iterator[None]:
    """Within, one call of the model runs. If it fails, the hooks by which peft has told the adapters of its rows go.

    peft removes them only after calls that work, so later calls would have these adapters too.
    """
    try:
        yield
    except BaseException:
        for module in model.modules():
            for key in [key for key, hook in module._forward_pre_hooks.items() if is_row_hook(hook)]:
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
        raise


def _closed(refusal: str, was: Mapping[Any, Any] = MappingProxyType({})) -> ClosedTable:
    table = ClosedTable()
    table.refusal = refusal
    for key, value in was.items():
        table[key] = value  # which refuses
    return table


class _Children(dict[str, nn.Module | None]):
    """The children of a module, of which those `fixed` (None: all) can only be wrapped by peft, and unwrapped."""

    where: ModulePlace
    fixed: Collection[str] | None

    def __setitem__(self, name: str, module: nn.Module | None) -> None:
        if self.fixed is None or name in self.fixed:
            current = self.get(name)
            if current is None or module is None or _bare(module) is not _bare(current):
                refuse_change(self.where / name)
            close_hooks(module, self.where / name)
        super().__setitem__(name, module)

    def __delitem__(self, name: str) -> None:
        if self.fixed is None or name in self.fixed:
            refuse_change(self.where / name)
        super().__delitem__(name)

    def clear(self) -> None:
        refuse_change(self.where)


def fix_children(module: nn.Module, where: ModulePlace, names: Collection[str] | None = None) -> None:
    """Let nobody but peft replace the children of `module`, or those of these names."""
    children, before = _Children(module._modules), getattr(module._modules, "fixed", None)
    children.where, children.fixed = where, names if names is None else {*names, *(before or ())}
    module.__dict__["_modules"] = children


def _bare(module: nn.Module) -> nn.Module:
    """The module without what peft has put around it."""
    bare: nn.Module = getattr(module, "get_base_layer", lambda: getattr(module, "original_module", module))()
    return bare


def close_hooks(module: nn.Module, where: ModulePlace) -> None:
    """Have `module` and all modules in it refuse hooks, of which none would ever run.

    Raises:
        ConfigurationError: it has some.
    """
    for path, part in module.named_modules():
        for name in _HOOKS:
            if not isinstance(hooks := part.__dict__[name], ClosedTable):
                part.__dict__[name] = _closed(
                    f"no hook can run in {where / path}, because servers run the blocks: put it on the forward of a "
                    "whole block, whose hidden states pass through here",
                    hooks,
                )


def refuse_change(what: object) -> Never:
    """Refuse a change of a block."""
    raise ConfigurationError(
        f"{what} can't be changed here, because servers keep the blocks as they are: adapt linear modules with peft, "
        "or put modules of your own between slices of model.remote_blocks"
    )


def _is_same(known: Any, value: Any) -> bool:
    return isinstance(value, bool | int | float | str) and type(known) is type(value) and bool(known == value)


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
            or (isinstance(value, nn.Module) and name in self._modules)  # `_Children` decides
        ):
            refuse_change(self.swarm_where / name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        refuse_change(self.swarm_where / name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Nothing new can reach the servers."""
        refuse_change(self.swarm_where / name)

    def hollow_tensors(self) -> dict[str, HollowTensor]:
        """Its own weights, by name."""
        return {name: value for name, value in self.__dict__.items() if isinstance(value, HollowTensor)}

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        """Those that are trained here, and its weights, by whoever asks a block for them and not the model."""
        yield from super().parameters(recurse)
        for part in self.modules() if recurse else (self,):
            yield from part.hollow_tensors().values() if isinstance(part, HollowModule) else ()

    def __deepcopy__(self, _memo: Any) -> nn.Module:
        """A real module with these weights, for peft to train as a whole."""
        sizes = [
            weight.numel()
            for part in self.modules()
            if isinstance(part, HollowModule)
            for weight in part.hollow_tensors().values()
        ]
        if not self.swarm_where.path or self.swarm_read is None or sum(sizes) > MAX_WHOLE:
            raise ConfigurationError(
                f"{self.swarm_where} can't be copied, nor trained whole, because its weights are on servers "
                "(modules_to_save and layer_replication of peft do so): train modules outside the blocks, norms, or "
                "adapters of linear modules inside"
            )
        return copy.deepcopy(self.swarm_read().get_submodule(self.swarm_where.path))

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Blocks are frozen as it is."""
        if requires_grad:
            refuse_change(self.swarm_where)
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name, value in self.__dict__.items():
            if isinstance(value, HollowTensor) and f"{prefix}{name}" in state_dict:
                refuse_change(value.place)
        super()._load_from_state_dict(state_dict, prefix, *args)


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
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                module.__dict__[key] = None if tensor is None else hollow_tensor(tensor, dtype, where / key)
                if tensor is not None:
                    module.__dict__[key].is_parameter = tensors is module._parameters
                if tensor is not None and read is not None:
                    module.__dict__[key].read = partial(_value, read, path, key)
                    if tensor.ndim == 1 and tensors is module._parameters:
                        module.__dict__[key].train_here = partial(own_parameter, module, key, True)
        for table in ("_parameters", "_buffers"):
            nothing_new = f"{where} can't be given a tensor, because servers keep the blocks as they are"
            module.__dict__[table] = _closed(nothing_new)
        fix_children(module, where)
        module.__dict__["swarm_where"], module.__dict__["swarm_read"] = where, read
        cls: Any = type(module)
        module.__class__ = _hollow_class(cls)


def _value(read: Callable[[], nn.Module], path: str, name: str) -> Tensor:
    value: Tensor = getattr(read().get_submodule(path), name)
    return value.detach()
