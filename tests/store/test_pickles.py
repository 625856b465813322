from __future__ import annotations

import argparse
import collections
import gc
import os
import pickle
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mtpconv.errors import UnreadableError
from mtpconv.store import objects, pickles
from mtpconv.store.objects import plain
from mtpconv.store.pickle_writer import dump_pickle
from mtpconv.store.pickles import Global, Instance, load_pickle
from mtpconv.store.torch_names import allow_metadata, allow_object, allow_tensor


def anything(module: str, name: str) -> bool:
    return True


def nothing(module: str, name: str) -> bool:
    return False


texts = st.text(max_size=20)
atoms = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
values = st.recursive(
    atoms,
    lambda parts: (
        st.lists(parts, max_size=5)
        | st.lists(parts, max_size=5).map(tuple)
        | st.dictionaries(texts | st.integers(-99, 99), parts, max_size=4)
    ),
    max_leaves=30,
)


@given(values, st.integers(2, 5))
def test_reads_what_pickle_writes(value: Any, protocol: int) -> None:
    assert load_pickle(pickle.dumps(value, protocol), "x", nothing) == value


@given(values)
def test_writes_what_it_and_pickle_read(value: Any) -> None:
    data = dump_pickle(value)
    assert load_pickle(data, "x", nothing) == value
    assert pickle.loads(data) == value


def test_more_than_256_names_are_written_once_each() -> None:
    value = [f"name {n}" for n in range(300)] * 2
    data = dump_pickle(value)
    assert load_pickle(data, "x", nothing) == pickle.loads(data) == value
    assert data.count(b"name 299") == 1


@pytest.mark.parametrize("value", [object(), {1, 2}, b"x", 1j])
def test_values_that_torch_could_not_read_are_not_written(value: object) -> None:
    with pytest.raises(TypeError, match="cannot write"):
        dump_pickle([value])


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_objects_stay_names(protocol: int) -> None:
    data = pickle.dumps(argparse.Namespace(a=1, b=[2]), protocol)
    found = load_pickle(data, "x", allow_object)
    assert type(found) is Instance
    assert found.of == Global("argparse", "Namespace")
    assert found.new
    assert found.state == {"a": 1, "b": [2]}
    assert pickle.loads(dump_pickle(found)) == argparse.Namespace(a=1, b=[2])


def test_an_allowed_name_is_not_imported() -> None:
    data = b"\x80\x02cmegatron.not_there\nAnything\nK\x05\x85R."
    found = load_pickle(data, "x", allow_object)
    assert str(found.of) == "megatron.not_there.Anything"
    assert found.args == (5,)
    assert "megatron.not_there" not in sys.modules


class Bomb:
    def __init__(self, call: Any, *args: Any) -> None:
        self.call = call
        self.args = args

    def __reduce__(self) -> Any:
        return self.call, self.args


@pytest.mark.parametrize("allow", [allow_metadata, allow_tensor, allow_object])
@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("call", [os.system, eval, exec, __import__, getattr, open, print])
def test_a_pickle_that_calls_something_is_refused(allow: Any, protocol: int, call: Any) -> None:
    data = pickle.dumps({"weights": Bomb(call, "x")}, protocol)
    with pytest.raises(UnreadableError, match=rf"^common\.pt calls \w+\.{call.__name__}, which no"):
        load_pickle(data, "common.pt", allow)


@pytest.mark.parametrize(
    "name",
    [
        "torch.load", "torch.hub.load", "torch.jit.load", "torch.utils.data.x", "subprocess.Popen",
        "shutil.rmtree", "builtins.type", "functools.partial", "numpy.load", "posix.system",
        "torch.serialization.load", "torch._utils._import_dotted_name", "pathlib.Path.unlink",
        "megatron.core.safe_globals.safe_load_from_bytes", "pickle.loads", "operator.attrgetter",
    ],
)  # fmt: skip
@pytest.mark.parametrize("allow", [allow_metadata, allow_tensor, allow_object])
def test_names_that_load_or_run_something_are_refused(name: str, allow: Any) -> None:
    module, _, last = name.rpartition(".")
    for data in (
        f"\x80\x02c{module}\n{last}\n)R.".encode("latin1"),
        b"\x80\x04\x8c" + bytes([len(module)]) + module.encode()
        + b"\x8c" + bytes([len(last)]) + last.encode() + b"\x93)R.",
    ):  # fmt: skip
        with pytest.raises(UnreadableError, match=r"calls .*; do not load it with torch either"):
            load_pickle(data, "x", allow)


def test_nothing_runs(tmp_path: Path) -> None:
    witness = tmp_path / "ran"
    data = pickle.dumps(Bomb(os.mkdir, str(witness)), 4)
    with pytest.raises(UnreadableError):
        load_pickle(data, "x", allow_object)
    found = load_pickle(data, "x", anything)  # even if every name were allowed
    assert type(found) is Instance
    assert not witness.exists()


@pytest.mark.parametrize(
    ("what", "data"),
    [
        ("extension registry", b"\x80\x02\x82\x01."),
        ("extension registry", b"\x80\x02\x84\x01\0\0\0."),
        ("INST", b"(ios\nsystem\n."),
        ("OBJ", b"\x80\x02(cos\nsystem\no."),
        ("PERSID", b"Pid\n."),
        ("BINPERSID outside records", b"\x80\x02K\x01Q."),
        ("NEWOBJ_EX", b"\x80\x04)}N\x92."),
        ("NEXT_BUFFER", b"\x80\x05\x97."),
        ("text integer", b"I5\n."),
        ("DUP", b"\x80\x02N2\x86."),
        ("protocol 9", b"\x80\x09N."),
    ],
)
def test_opcodes_that_no_checkpoint_needs_are_refused(what: str, data: bytes) -> None:
    with pytest.raises(UnreadableError, match=r"^x "):
        load_pickle(data, "x", allow_object)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"\x80\x02",
        b"\x80\x02NN.",
        b"\x80\x02h\x05.",
        b"\x80\x02j\xff\xff\xff\xff.",
        b"\x80\x02Nr\xff\xff\xff\x7f.",  # a memo of 2 ** 31 entries
        b"\x80\x02X\xff\xff\xff\xffabc.",
        b"\x80\x04\x8b\xff\xff\xff\x7f1.",
        b"\x80\x02N)R.",  # not a name called
        b"\x80\x02cargparse\nNamespace\nN\x81.",  # not with arguments
        b"\x80\x02}Nb.",  # state of something that is no object
        b"\x80\x02cargparse\nNamespace\n)\x81}b}b.",  # state twice
        b"\x80\x02](NNu.",  # pairs for a list
        b"\x80\x02}(Nu.",  # a key without value
        b"\x80\x02}]Ns.",  # a list as key
        b"\x80\x02\x85.",
        b"\x80\x02u.",
        b"\x80\x02cargparse\n" + b"N" * 600 + b"\n.",
        b"\x80\x04\x8c\x02os)\x93.",
        b"\x80\x02X\x02\0\0\0\xff\xfe.",
    ],
)
def test_damage_is_named_and_costs_nothing(data: bytes) -> None:
    with pytest.raises(UnreadableError, match=r"^x "):
        load_pickle(data, "x", allow_object)


def test_a_pickle_cut_anywhere_is_damage() -> None:
    value = {"a": [1, 300, 70000, -1, 2**40, 1.5, None, True, ("x", "y")], "n": "é"}
    for protocol in range(2, 6):
        data = pickle.dumps([value, argparse.Namespace(**value)], protocol)
        for end in range(len(data)):
            with pytest.raises(UnreadableError):
                load_pickle(data[:end], "x", allow_object)


@given(st.binary(max_size=80))
@example(b"\x80\x02(((((((.")
def test_random_bytes_are_refused_or_read(data: bytes) -> None:
    with suppress(UnreadableError):
        load_pickle(b"\x80\x04" + data, "x", allow_object)


OPCODES = [
    b"N", b"\x88", b"K\x01", b"M\x01\x02", b"J\1\2\3\4", b"\x8a\x01\x05", b"G" + bytes(8), b"(",
    b"}", b"]", b")", b"t", b"\x85", b"\x86", b"\x87", b"u", b"s", b"e", b"a", b"b", b"R", b"\x81",
    b"q\x00", b"q\x01", b"h\x00", b"h\x01", b"\x94", b"\x93", b"Q", b"C\x01x", b"\x95" + bytes(8),
    b"X\x01\0\0\0a", b"\x8c\x03set", b"\x8c\x08builtins", b"ctorch\nSize\n",
    b"cargparse\nNamespace\n", b"ccollections\nOrderedDict\n",
]  # fmt: skip


@settings(max_examples=400)
@given(st.lists(st.sampled_from(OPCODES), max_size=40))
def test_any_sequence_of_opcodes_gives_a_value_or_a_documented_error(ops: list[bytes]) -> None:
    with suppress(UnreadableError):
        plain(load_pickle(b"".join([b"\x80\x02", *ops, b"."]), "x", allow_object), "x")
    with suppress(UnreadableError):
        load_pickle(b"".join([b"\x80\x02(", *ops, b"t."]), "x", anything, persistent=True)


@given(st.data())
def test_a_changed_byte_gives_a_value_or_a_documented_error(data: st.DataObject) -> None:
    good = bytearray(pickle.dumps([argparse.Namespace(a=(1, 2), b={"c": 1.5})], 2))
    at = data.draw(st.integers(0, len(good) - 1))
    good[at] = data.draw(st.integers(0, 255))
    with suppress(UnreadableError):
        plain(load_pickle(bytes(good), "x", allow_object), "x")


def test_deep_nesting_is_read_without_recursion_and_refused_as_a_tree() -> None:
    deep = b"\x80\x02" + b"]" * 500_000 + b"a" * 499_999 + b"."
    value = load_pickle(deep, "x", nothing)
    with pytest.raises(UnreadableError, match="nested too deeply"):
        plain(value, "x")


def test_a_key_whose_hash_takes_for_ever_is_refused() -> None:
    doubled = b"\x80\x02}K\x01\x85q\x00" + b"".join(
        b"h" + bytes([n]) + b"\x86q" + bytes([n + 1]) for n in range(60)
    )
    started = time.monotonic()
    with pytest.raises(UnreadableError, match="has a tuple as a key"):
        load_pickle(doubled + b"Ns.", "x", nothing)
    assert time.monotonic() - started < 5


def test_keys_that_collide_by_the_thousand_are_refused() -> None:
    modulus = (1 << 61) - 1  # of Python's hash of integers
    many = dict.fromkeys(n * modulus for n in range(1, 50))
    with pytest.raises(UnreadableError, match="has a int as a key"):
        load_pickle(pickle.dumps(many), "x", nothing)
    for key in (1.5, (1, 2), (1 << 60)):
        with pytest.raises(UnreadableError, match="as a key; no checkpoint"):
            load_pickle(pickle.dumps({key: 1}), "x", nothing)
        ordered = collections.OrderedDict([(key, 1)])
        with pytest.raises(UnreadableError, match="as a key; no checkpoint"):
            load_pickle(pickle.dumps(ordered, 2), "x", allow_object)


def test_shared_parts_do_not_grow_without_bound() -> None:
    laughs = b"\x80\x02]q\x00" + b"".join(
        b"](h" + bytes([n]) + b"h" + bytes([n]) + b"eq" + bytes([n + 1]) for n in range(40)
    )
    marked = laughs.replace(b"\x80\x02", b"\x80\x02(", 1) + b"t."
    value = load_pickle(marked, "x", nothing)
    with pytest.raises(UnreadableError, match="nested too deeply or contains itself"):
        plain(value, "x")


def test_a_list_that_contains_itself_is_refused_as_a_tree() -> None:
    value = load_pickle(b"\x80\x02]q\x00h\x00a.", "x", nothing)
    with pytest.raises(UnreadableError, match="contains itself"):
        plain(value, "x")


def test_many_empty_containers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickles, "MAX_CONTAINERS", 1000)
    assert load_pickle(b"\x80\x02(" + b"}" * 998 + b"t.", "x", nothing)
    with pytest.raises(UnreadableError, match="builds more than 1,000 objects"):
        load_pickle(b"\x80\x02(" + b"}" * 1001 + b"t.", "x", nothing)


def test_a_size_is_not_copied_and_takes_a_tuple_only() -> None:
    one = b"\x80\x02ctorch\nSize\n(K\x01K\x02t\x85R."
    assert load_pickle(one, "x", allow_metadata) == (1, 2)
    for wrong in (b"](K\x01e\x85", b")", b"K\x01\x85", b"))\x86"):
        with pytest.raises(UnreadableError):
            load_pickle(b"\x80\x02ctorch\nSize\n" + wrong + b"R.", "x", allow_metadata)


def test_a_huge_integer_is_refused() -> None:
    data = b"\x80\x02\x8b" + struct.pack("<I", 5000) + b"\x01" * 5000 + b"."
    with pytest.raises(UnreadableError, match="integer of 5000 bytes"):
        load_pickle(data, "x", nothing)


def test_the_garbage_collector_is_as_before_even_after_an_error() -> None:
    assert gc.isenabled()
    with pytest.raises(UnreadableError):
        load_pickle(b"\x80\x02", "x", nothing)
    assert gc.isenabled()
    gc.disable()
    try:
        load_pickle(b"\x80\x02N.", "x", nothing)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_namespaces_and_mappings_become_dicts_and_other_objects_stay() -> None:
    state = {
        "args": argparse.Namespace(lr=0.1, betas=(0.9, 0.95), path=Path("/x")),
        "ordered": collections.OrderedDict(a=1),
    }
    tree = plain(load_pickle(pickle.dumps(state, 2), "x", allow_object), "x")
    assert tree["ordered"] == {"a": 1}
    path = tree["args"].pop("path")
    assert tree["args"] == {"lr": 0.1, "betas": (0.9, 0.95)}
    assert path.of.module.startswith("pathlib")
    assert path.args[-1] == "x"


def test_a_damaged_mapping_is_refused() -> None:
    value = Instance(Global("collections", "OrderedDict"))
    value.add([1, 2])
    with pytest.raises(UnreadableError, match="damaged mapping"):
        objects.plain([value], "x")
    value.items = [((1, 2), 3)]
    with pytest.raises(UnreadableError, match="damaged mapping"):
        objects.plain([value], "x")


def test_a_name_with_line_breaks_stays_in_one_line() -> None:
    data = b"\x80\x04\x8c\x03a\nb\x8c\x04c\x1b[1\x93."
    with pytest.raises(UnreadableError, match=r"^x calls a\?b\.c\?\[1, which") as caught:
        load_pickle(data, "x", allow_object)
    assert "\n" not in str(caught.value)
