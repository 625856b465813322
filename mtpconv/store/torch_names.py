"""The names that pickles of a torch_dist checkpoint may mention: closed lists.

Being listed does not make a name callable: `mtpconv.store.pickles` never calls anything. The
lists exist to refuse, with the name, a file that would run code when torch reads it.

Source: torch 2.6 to 2.14.1 torch/distributed/checkpoint/{metadata,planner,filesystem}.py,
torch/_utils.py; megatron-core 0.16.1 and 0.19.2 megatron/core/safe_globals.py; and the
`.metadata` and `common.pt` files they wrote; read 2026-11-29.
"""

from __future__ import annotations

from collections.abc import Mapping

#: safetensors dtype name and bytes of an element, by torch dtype name.
TORCH_DTYPES: Mapping[str, tuple[str, int]] = {
    "float64": ("F64", 8), "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2),
    "int64": ("I64", 8), "int32": ("I32", 4), "int16": ("I16", 2), "int8": ("I8", 1),
    "uint64": ("U64", 8), "uint32": ("U32", 4), "uint16": ("U16", 2), "uint8": ("U8", 1),
    "bool": ("BOOL", 1), "complex64": ("C64", 8),
    "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1),
    "float8_e8m0fnu": ("F8_E8M0", 1), "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
}  # fmt: skip

#: torch dtype name, by the storage class that a tensor record names.
STORAGES: Mapping[str, str] = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32",
    "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
}  # fmt: skip

_OTHER_DTYPES = frozenset(
    {"complex32", "complex128", "float4_e2m1fn_x2", "quint8", "qint8", "qint32"}
)
_DTYPES = frozenset(TORCH_DTYPES) | _OTHER_DTYPES

_TENSOR = {
    "torch": frozenset(STORAGES) | _DTYPES | {"ComplexDoubleStorage", "Size", "device"},
    "torch._utils": frozenset({"_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"}),
    "torch.storage": frozenset({"UntypedStorage", "TypedStorage"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "collections": frozenset({"OrderedDict"}),
}

_METADATA = {
    "torch": _DTYPES | {"Size"},
    "torch.serialization": frozenset({"_get_layout"}),
    "pathlib": frozenset({"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}),
    "pathlib._local": frozenset({"PosixPath", "WindowsPath"}),  # Python 3.13
    "torch.distributed.checkpoint.metadata": frozenset(
        {
            "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
            "TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        }
    ),
    "torch.distributed.checkpoint.planner": frozenset(
        {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"}
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo", "_StoragePrefix"}),
    "torch.distributed._shard.sharded_tensor.metadata": frozenset(  # before torch 2.3
        {"TensorProperties", "MEM_FORMAT_ENCODING"}
    ),
    "megatron.core.dist_checkpointing.strategies.torch": frozenset(  # megatron-core 0.14, 0.15
        {"MCoreMetadata", "MCoreSavePlan"}
    ),
}  # fmt: skip

_NUMPY = frozenset({"_reconstruct", "scalar", "ndarray", "dtype"})
_BUILTINS = frozenset({"set", "frozenset", "bytearray", "complex", "slice", "range"})
_OBJECTS = {
    **_TENSOR,
    "collections": frozenset({"OrderedDict", "defaultdict", "deque", "Counter"}),
    "argparse": frozenset({"Namespace"}),
    "types": frozenset({"SimpleNamespace"}),
    "pathlib": _METADATA["pathlib"],
    "pathlib._local": _METADATA["pathlib._local"],
    "signal": frozenset({"Signals"}),
    "_io": frozenset({"BytesIO"}),
    "io": frozenset({"BytesIO"}),
    "_codecs": frozenset({"encode"}),  # how protocol 2 spells bytes
    "datetime": frozenset({"datetime", "date", "time", "timedelta", "timezone"}),
    "builtins": _BUILTINS,
    "__builtin__": _BUILTINS,
    "numpy": _NUMPY,
    "numpy.core.multiarray": _NUMPY,
    "numpy._core.multiarray": _NUMPY,
    "torch._C": frozenset({"Generator"}),
}


def allow_metadata(module: str, name: str) -> bool:
    """Names in `.metadata`."""
    return name in _METADATA.get(module, ())


def allow_tensor(module: str, name: str) -> bool:
    """Names in the head of a tensor record."""
    return name in _TENSOR.get(module, ())


def allow_object(module: str, name: str) -> bool:
    """Names in `common.pt` and in bytes entries: plain data, and any class of Megatron."""
    if module.startswith("megatron."):  # enums and config classes: kept as a name with state
        return not module.startswith("megatron.core.safe_globals")
    return name in _OBJECTS.get(module, ()) or module == "numpy.dtypes"
