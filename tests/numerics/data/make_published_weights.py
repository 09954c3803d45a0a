"""Makes published_weights.safetensors: one small weight in each published format, packed by the format's own package.

    python tests/numerics/data/make_published_weights.py [fp8 mxfp4 compressed_tensors … hqq torchao]

Makes those anew, and leaves the others. All together need the packages bitsandbytes, compressed-tensors (last: 0.20.0;
`ordered` an old one, 0.12.2, as newer ones don't order groups), autoawq, auto-round (0.16.1, which reads GPTQ),
nvidia-modelopt (0.47.0), hqq (0.2.8.post1) and torchao (0.18.0).

The file's metadata has, for each weight, its `quantization_config` and the SHA-256 of what that package makes of the
packed weight again, as float32. Where there is no such package (FP8 by blocks and MXFP4, which transformers reads in
`test_published_readers.py`, and torchao's int4, which needs CUDA), the reference is what the weight was made from.
Frozen, so that tests need none of the packages, and a later release of one can't change them.
"""

import hashlib
import json
import math
import sys
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

HERE = Path(__file__).parent
F8 = torch.float8_e4m3fn
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
tensors: dict[str, Tensor] = {}
about: dict[str, str] = {}


def add(name: str, settings: dict, parts: dict[str, Tensor], expected: Tensor) -> None:
    digest = hashlib.sha256(expected.float().contiguous().numpy().tobytes()).hexdigest()
    about[name] = json.dumps({"settings": settings, "sha256": digest, "dtype": str(expected.dtype).split(".")[1]})
    tensors.update({f"{name}/{part}": tensor.contiguous().clone() for part, tensor in parts.items()})


def random(rows: int = 48, columns: int = 256) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns)).bfloat16()


def fp8() -> None:
    for rows, columns in ((144, 256), (160, 192)):  # the last blocks of a side are parts of one
        weight, block = random(rows, columns).float(), 128
        shape = math.ceil(rows / block), math.ceil(columns / block)
        scale = torch.rand(shape, generator=torch.Generator().manual_seed(1)) / 100
        whole = scale.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
        codes = (weight / whole).clamp(-448, 448).to(F8)
        settings = {"quant_method": "fp8", "weight_block_size": [block, block]}
        add(f"fp8_{rows}x{columns}", settings, {".weight": codes, ".weight_scale_inv": scale}, codes.float() * whole)
    weight = random().float()
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scale).to(F8)
    add("fbgemm", {"quant_method": "fbgemm_fp8"}, {".weight": codes, ".weight_scale": scale}, codes.float() * scale)


def mxfp4() -> None:
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 16, (2, 48, 64), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(115, 130, (2, 48, 2), generator=generator, dtype=torch.uint8)
    blocks = (codes[..., 0::2] | (codes[..., 1::2] << 4)).unflatten(-1, (2, 16))
    weight = E2M1[codes.long()].unflatten(-1, (2, 32)) * torch.exp2(exponents.float() - 127)[..., None]
    add("mxfp4", {"quant_method": "mxfp4"}, {"_blocks": blocks, "_scales": exponents}, weight.flatten(-2))


def compressed_tensors() -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    def one(name: str, form: str, **options: object) -> None:
        args = QuantizationArgs(**options)
        scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
        compressor = BaseCompressor.get_value_from_registry(form)
        weight = random(48, 192) if "block_structure" in options else random()  # the last blocks are parts of one
        state = {"weight": weight}
        if args.strategy == "tensor_group":
            factor = 448 * 6 / weight.float().abs().max()
            groups = weight.float().view(len(weight), -1, 16).abs().amax(-1)
            state |= {"weight_scale": (groups / 6 * factor).to(F8).float(), "weight_global_scale": factor.reshape(1)}
        elif args.strategy == "block":
            tiles = F.pad(weight.float(), (0, 64, 0, 16)).unflatten(1, (-1, 128)).unflatten(0, (-1, 32)).abs()
            state |= {"weight_scale": (tiles.amax((1, 3)) / 448).bfloat16()}
        else:
            shape = {"group": (len(weight), -1, args.group_size), "channel": (len(weight), 1, -1), "tensor": (1, 1, -1)}
            groups = weight.float().view(shape[args.strategy])
            scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
            scale = scale.reshape(1) if args.strategy == "tensor" else scale
            scale = torch.exp2(scale.float().log2().ceil()) if form.startswith("mx") else scale
            state |= {"weight_scale": scale.bfloat16()} | ({} if args.symmetric else {"weight_zero_point": zero})
        packed = compressor.compress(dict(state), scheme)
        back = compressor.decompress(dict(packed), scheme)["weight"]
        settings = QuantizationConfig(
            config_groups={"group_0": scheme}, quant_method="compressed-tensors", format=form
        ).model_dump(mode="json")
        add(name, settings, {f".{part}": tensor for part, tensor in packed.items()}, back.bfloat16())

    one("ct_int4", "pack-quantized", num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    one("ct_int4_zeros", "pack-quantized", num_bits=4, type="int", symmetric=False, strategy="group", group_size=128)
    one("ct_int8_packed", "pack-quantized", num_bits=8, type="int", symmetric=True, strategy="group", group_size=64)
    one("ct_int2", "pack-quantized", num_bits=2, type="int", symmetric=True, strategy="group", group_size=32)
    one("ct_int8_zeros", "pack-quantized", num_bits=8, type="int", symmetric=False, strategy="group", group_size=64)
    one(
        "ct_fp8_blocks",
        "float-quantized",
        num_bits=8,
        type="float",
        symmetric=True,
        strategy="block",
        block_structure=[32, 128],
    )
    for bits, form in ((4, "mxfp4-pack-quantized"), (8, "mxfp8-quantized")):
        options = {"type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
        one(f"ct_mxfp{bits}", form, num_bits=bits, scale_dtype=torch.uint8, **options)
    one("ct_int8", "int-quantized", num_bits=8, type="int", symmetric=True, strategy="channel")
    one("ct_fp8_rows", "float-quantized", num_bits=8, type="float", symmetric=True, strategy="channel")
    one("ct_fp8", "float-quantized", num_bits=8, type="float", symmetric=True, strategy="tensor")
    one(
        "ct_nvfp4",
        "nvfp4-pack-quantized",
        num_bits=4,
        type="float",
        symmetric=True,
        strategy="tensor_group",
        group_size=16,
    )


def ordered() -> None:
    """A group's inputs lie anywhere (`actorder`)."""
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=64, actorder="group")
    weight = random()
    group = torch.arange(256)[torch.randperm(256, generator=torch.Generator().manual_seed(3))] // 64
    scale = torch.stack([weight[:, group == one].abs().amax(1) for one in range(4)], 1) / 7
    state = {"weight_scale": scale, "weight_g_idx": group.int()}
    compressor = PackedQuantizationCompressor()
    packed = compressor.compress_weight(weight, scale, g_idx=group.int(), quantization_args=args) | state
    back = compressor.decompress_weight(dict(packed), args)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    settings = QuantizationConfig(
        config_groups={"group_0": scheme}, quant_method="compressed-tensors", format="pack-quantized"
    ).model_dump(mode="json")
    add("ct_int4_ordered", settings, {f".{part}": tensor for part, tensor in packed.items()}, back.bfloat16())


def modelopt() -> None:
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    def settings(algorithm: str) -> dict:
        return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}

    packed, scale, whole = NVFP4QTensor.quantize(random().float(), 16)
    back = packed.dequantize(torch.float32, scale=scale, double_scale=whole, block_sizes={-1: 16})
    parts = {".weight": packed._quantized_data, ".weight_scale": scale, ".weight_scale_2": whole}
    add("modelopt_nvfp4", settings("NVFP4"), parts | {".input_scale": torch.tensor(0.1)}, back)
    smoothed = torch.rand(256, generator=torch.Generator().manual_seed(4)).bfloat16()
    inputs = torch.diag(smoothed.float())  # modelopt multiplies inputs by it: of each input alone, that is this
    add("modelopt_smoothed", settings("NVFP4_AWQ"), parts | {".pre_quant_scale": smoothed}, (inputs @ back.T).T)
    for name, algorithm, axis in (
        ("modelopt_fp8", "FP8", None),
        ("modelopt_fp8_rows", "FP8_PER_CHANNEL_PER_TOKEN", 0),
    ):
        packed, scale = FP8QTensor.quantize(random().float(), axis=axis)
        parts = {".weight": packed._quantized_data, ".weight_scale": scale.flatten() if axis == 0 else scale.squeeze()}
        add(name, settings(algorithm), parts, packed.dequantize(torch.float32, scale=scale))


def bitsandbytes() -> None:
    import bitsandbytes.functional as functional

    for name, kind, nested in (("bnb_nf4", "nf4", False), ("bnb_nf4_nested", "nf4", True), ("bnb_fp4", "fp4", False)):
        codes, state = functional.quantize_4bit(random(), blocksize=64, compress_statistics=nested, quant_type=kind)
        parts = {f".weight.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}
        settings = {"quant_method": "bitsandbytes", "load_in_4bit": True}
        add(name, settings, {".weight": codes, **parts}, functional.dequantize_4bit(codes, state).bfloat16())
    codes, scale, _ = functional.int8_vectorwise_quant(random().half())
    parts = {".weight": codes, ".SCB": scale, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    back = functional.int8_vectorwise_dequant(codes, scale)
    add("bnb_int8", {"quant_method": "bitsandbytes", "load_in_8bit": True}, parts, back)


def words(codes: Tensor, bits: int, dim: int) -> Tensor:
    groups = codes.movedim(dim, -1).long().unflatten(-1, (-1, 32 // bits))
    packed = (groups << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int().movedim(-1, dim).contiguous()


def by_groups(weight: Tensor, bits: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes `[in, out]`, scales and zeros `[groups, out]`."""
    groups = weight.float().T.unflatten(0, (-1, size))
    low, high = groups.amin(1).clamp_max(0), groups.amax(1).clamp_min(0)
    scale = ((high - low) / (2**bits - 1)).half()
    zero = (-low / scale.float()).round().clamp(1, 2**bits - 1)
    codes = (groups / scale.float()[:, None] + zero[:, None]).round().clamp(0, 2**bits - 1)
    return codes.flatten(0, 1).int(), scale, zero.int()


def awq() -> None:
    from awq.utils.packing_utils import dequantize_gemm

    codes, scale, zero = by_groups(random(), 4, 128)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    packed, zeros = (words(t.unflatten(-1, (-1, 8))[..., order].flatten(-2), 4, 1) for t in (codes, zero))
    parts = {".qweight": packed, ".qzeros": zeros, ".scales": scale}
    settings = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
    add("awq", settings, parts, dequantize_gemm(packed, zeros, scale.float(), 4, 128).T)


def gptq() -> None:
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    for name, bits, act_order, version in (
        ("gptq", 4, False, "gptq"),
        ("gptq_act_order", 4, True, "gptq"),
        ("gptq_v2", 4, False, "gptq_v2"),
        ("gptq_8_bits", 8, False, "gptq"),
        ("gptq_2_bits", 2, False, "gptq"),
    ):
        weight = random()
        columns = weight.shape[1]
        order = (
            torch.randperm(columns, generator=torch.Generator().manual_seed(3)) if act_order else torch.arange(columns)
        )
        sorted_codes, scale, zero = by_groups(weight[:, order], bits, 128)
        group = torch.empty(columns, dtype=torch.int32)
        codes = torch.empty_like(sorted_codes)
        group[order], codes[order] = (torch.arange(columns) // 128).int(), sorted_codes
        parts = {
            ".qweight": words(codes, bits, 0),
            ".qzeros": words(zero if version == "gptq_v2" else zero - 1, bits, 1),
            ".scales": scale,
            ".g_idx": group,
        }
        settings = {"quant_method": "gptq", "bits": bits, "group_size": 128, "desc_act": act_order}
        # auto-round has a class for each version; it multiplies, so a unit matrix gives the weight.
        reader = (qlinear_torch if version == "gptq_v2" else qlinear_torch_zp).QuantLinear
        linear = reader(bits, 128, columns, len(weight), bias=False, g_idx=True)
        for part, tensor in parts.items():
            setattr(linear, part[1:], tensor.float() if part == ".scales" else tensor)
        add(name, {**settings, "checkpoint_format": version}, parts, linear(torch.eye(columns)).T)


def hqq() -> None:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    for name, bits, axis, group, as_float, dtype in (
        ("hqq", 4, 1, 64, False, torch.float16),
        ("hqq_as_float", 4, 1, 64, True, torch.bfloat16),
        ("hqq_axis_0", 4, 0, 16, False, torch.float16),
        ("hqq_1_bit", 1, 1, 32, False, torch.bfloat16),
        ("hqq_2_bits", 2, 1, 64, False, torch.float16),
        ("hqq_3_bits", 3, 1, 64, True, torch.float16),
        ("hqq_8_bits", 8, 1, 128, False, torch.float32),
    ):
        linear = torch.nn.Linear(256, 48, bias=False)
        linear.weight.data = random().float()
        config = BaseQuantizeConfig(nbits=bits, group_size=group, axis=axis, view_as_float=as_float)
        state = HQQLinear(linear, config, compute_dtype=dtype, device="cpu").state_dict()
        reader = HQQLinear(None, None, compute_dtype=torch.float32, device="cpu")
        reader.load_state_dict(dict(state))
        settings = {"quant_method": "hqq", "quant_config": config, "skip_modules": ["lm_head"]}
        add(
            name,
            settings,
            {f".{part}": one.data for part, one in state.items() if one is not None},
            reader.dequantize(),
        )


def torchao() -> None:
    from torchao import quantization as ao
    from torchao.core.config import config_to_dict
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization.quant_primitives import MappingType, _dequantize_affine_tinygemm

    def saved(name: str, config: dict, parts: dict[str, Tensor], note: str, expected: Tensor) -> None:
        settings = {"quant_method": "torchao", "quant_type": {"default": json.loads(json.dumps(config))}}
        add(name, settings, {**parts, "about": torch.tensor(list(note.encode()), dtype=torch.uint8)}, expected)

    group, zeros = ao.PerGroup(32), MappingType.ASYMMETRIC
    for name, config in (
        ("ao_float8", ao.Float8WeightOnlyConfig()),
        ("ao_float8_tensor", ao.Float8WeightOnlyConfig(granularity=ao.PerTensor())),
        ("ao_int8", ao.Int8WeightOnlyConfig()),
        ("ao_int8_groups", ao.Int8WeightOnlyConfig(granularity=group)),
        ("ao_intx4", ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=group)),
        ("ao_intx4_zeros", ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=group, mapping_type=zeros)),
        ("ao_intx8_zeros", ao.IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=group, mapping_type=zeros)),
    ):
        linear = torch.nn.Linear(256, 48, bias=False, dtype=torch.bfloat16)
        linear.weight.data = random()
        ao.quantize_(linear, config)
        flat, notes = flatten_tensor_state_dict({"0.weight": linear.weight.data})
        parts = {key.removeprefix("0._weight_"): tensor for key, tensor in flat.items()}
        saved(name, config_to_dict(config), parts, notes["0.weight"], linear.weight.dequantize())

    rows, columns, size = 44, 256, 64  # rows are padded to 48, columns to 1024
    codes, scale, zero = by_groups(random(rows, columns), 4, size)
    codes, scale = codes.T.contiguous(), scale.T.bfloat16().contiguous()
    added = ((8 - zero.T) * scale.float()).bfloat16().contiguous()
    expected = _dequantize_affine_tinygemm(
        codes, (1, size), scale.float(), added.float(), torch.int32, 0, 15, output_dtype=torch.float32
    )
    data = {"block_size": [1, size], "shape": [rows, columns]}
    config = {"_type": "Int4WeightOnlyConfig", "_version": 2, "_data": {"group_size": size}}
    low, high = ((codes[:, start::2] - 8) & 15 for start in (0, 1))
    parts = {"qdata": (low | (high << 4)).byte().view(torch.int8), "scale": scale.T, "zero_point": added.T}
    saved("ao_int4", config, parts, json.dumps({"_type": "Int4Tensor", "_data": data}), expected)

    padded = torch.zeros(48, 1024, dtype=torch.int32)
    padded[:rows, :columns] = codes
    both = torch.zeros(1024 // size, 48, 2, dtype=torch.bfloat16)
    both[: columns // size, :rows] = torch.stack((scale.T, added.T), -1)
    tiles = torch.zeros(6, 8, 32, 4, dtype=torch.int64)
    for lane in range(32):  # each in the words of torch's CUDA source, one code after the other
        for word in range(4):
            for place, step in enumerate((0, 8, 16, 24, 1, 9, 17, 25)):
                column = word * 32 + lane % 4 * 2 + step
                tiles[:, :, lane, word] |= padded[lane // 4 :: 8, column::128].long() << (4 * place)
    tiles = torch.where(tiles >= 2**31, tiles - 2**32, tiles).int()
    config["_data"] |= {"int4_packing_format": {"_type": "Int4PackingFormat", "_data": "TILE_PACKED_TO_4D"}}
    note = json.dumps({"_type": "Int4TilePackedTo4dTensor", "_data": data})
    saved("ao_int4_tiles", config, {"qdata": tiles, "scale_and_zero": both}, note, expected)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    path = HERE / "published_weights.safetensors"
    tensors |= load_file(path)
    with safe_open(path, framework="pt") as file:
        about |= file.metadata()
    makers = (fp8, mxfp4, compressed_tensors, ordered, modelopt, bitsandbytes, awq, gptq, hqq, torchao)
    for make in makers:
        if make.__name__ in (sys.argv[1:] or [one.__name__ for one in makers]):
            make()
    save_file(tensors, path, metadata=about)
