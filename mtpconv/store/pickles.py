"""Reading pickles without importing, calling or trusting anything that they name.

A torch_dist checkpoint is full of pickles: `.metadata`, `common.pt`, the head of every
tensor record. The machine here knows only the opcodes that `pickle` and `torch.save` write
(protocols 2 to 5) and builds plain Python values, `Global`s (a name) and `Instance`s (a name
with arguments and state). A class named in a pickle stays a name.

Source: CPython 3.12 Lib/pickletools.py, opcode table, read 2026-11-29.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from mtpconv.errors import UnreadableError
from mtpconv.store.collector import no_collector

#: Says whether a pickle may name this (module, name).
Allow = Callable[[str, str], bool]
#: Replaces each pair of a dict whose keys are `Instance`s, as soon as the pair is complete.
Fold = Callable[[Any, Any], tuple[Any, Any]]

#: Containers a pickle may build; 60,000 chunks with their save plans need about 1.5 million.
MAX_CONTAINERS = 24_000_000
#: Bytes of one integer; the longest seen are random-generator states of 4 bytes.
MAX_INT_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Global:
    """A name that a pickle refers to, `module.name`; never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Instance:
    """What a pickle says about an object: its class or function, arguments, state, items.

    `new` tells an object made by `of.__new__(of, *args)` from the result of `of(*args)`.
    Hashed and compared by identity, so that no value from a file decides what that costs.
    """

    __slots__ = ("args", "items", "new", "of", "state")

    def __init__(
        self, of: Global, args: tuple[Any, ...] = (), state: Any = None, *, new: bool = False
    ) -> None:
        self.of = of
        self.args = args
        self.state = state
        self.items: list[Any] | None = None
        self.new = new

    def __repr__(self) -> str:
        return f"Instance({str(self.of)!r})"

    def add(self, items: Iterable[Any]) -> None:
        """Append elements (list-like objects) or key-value pairs (dict-like objects)."""
        if self.items is None:
            self.items = []
        self.items.extend(items)

    def field(self, name: str) -> Any:
        """A value of the object's state, None if it has no such field."""
        return self.state.get(name) if type(self.state) is dict else None


#: `Instance.of` of a persistent id (`torch.save` refers to storages with these).
PERSISTENT = Global("", "persistent id")

_KEYS = (str, bytes, bool, type(None), Global, Instance)
_CORRUPT = (IndexError, KeyError, TypeError, ValueError, AttributeError, struct.error)


class _Refused(Exception):
    """The pickle does something that no checkpoint needs."""


def load_pickle(
    data: bytes,
    where: str,
    allow: Allow,
    *,
    persistent: bool = False,
    fold: Fold | None = None,
) -> Any:
    """The value that a pickle describes; `where` names it in errors.

    `persistent` admits persistent ids; `fold` makes pairs small while they are still few.

    Law: nothing is imported or called; time and memory are linear in `len(data)`.
    Raises: UnreadableError for a name that `allow` refuses, an opcode that checkpoints do not
        use, or a damaged pickle.
    """
    try:
        with no_collector():  # millions of live containers and no garbage
            return _run(data, allow, persistent, fold)
    except _Refused as error:
        raise UnreadableError(f"{where} {error}") from None
    except StopIteration:
        raise UnreadableError(
            f"{where} builds more than {MAX_CONTAINERS:,} objects; no checkpoint needs that"
        ) from None
    except _CORRUPT:
        raise UnreadableError(
            f"{where} is not a whole pickle; it is truncated or corrupt, copy it again"
        ) from None


def _run(  # noqa: C901 one table of opcodes
    data: bytes, allow: Allow, persistent: bool, fold: Fold | None
) -> Any:
    """The machine itself: one branch per opcode, the frequent ones first.

    Reading past the end needs no check of its own: the next opcode is then missing too.
    """
    stack: list[Any] = []
    marks: list[list[Any]] = []
    memo: list[Any] = []
    names: dict[tuple[str, str], Global] = {}
    spend = iter(range(MAX_CONTAINERS)).__next__  # raises StopIteration when used up
    push = stack.append
    u16 = struct.Struct("<H").unpack_from
    i32 = struct.Struct("<i").unpack_from
    u32 = struct.Struct("<I").unpack_from
    pos = 0

    def find(module: Any, name: Any) -> Global:
        if type(module) is not str or type(name) is not str:
            raise ValueError
        known = names.get((module, name))
        if known is None:
            if not allow(module, name):
                shown = "".join(c if c.isprintable() else "?" for c in f"{module}.{name}"[:120])
                raise _Refused(
                    f"calls {shown}, which no checkpoint needs; do not load it with torch either"
                )
            known = names[module, name] = Global(module, name)
        return known

    while True:
        op = data[pos]
        pos += 1
        if op == 0x6A:  # LONG_BINGET
            push(memo[u32(data, pos)[0]])
            pos += 4
        elif op == 0x94:  # MEMOIZE
            memo.append(stack[-1])
        elif op == 0x4B:  # BININT1
            push(data[pos])
            pos += 1
        elif op == 0x68:  # BINGET
            push(memo[data[pos]])
            pos += 1
        elif op == 0x4A:  # BININT
            push(i32(data, pos)[0])
            pos += 4
        elif op == 0x71 or op == 0x72:  # BINPUT, LONG_BINPUT
            index = data[pos] if op == 0x71 else u32(data, pos)[0]
            pos += 1 if op == 0x71 else 4
            if index > len(memo):  # every pickler numbers them in order
                raise ValueError
            memo[index : index + 1] = stack[-1:]
        elif op == 0x28:  # MARK
            marks.append(stack)
            stack = []
            push = stack.append
        elif op == 0x29:  # EMPTY_TUPLE
            of = stack[-1] if stack and data[pos] == 0x81 else None
            if type(of) is Global and not is_size(of):  # with NEWOBJ: most of what there is
                spend()
                stack[-1] = Instance(of, new=True)
                pos += 1
            else:
                push(())
        elif op == 0x7D:  # EMPTY_DICT
            spend()
            push({})
        elif op == 0x81 or op == 0x52:  # NEWOBJ, REDUCE
            args = stack.pop()
            of = stack.pop()
            if type(of) is not Global or type(args) is not tuple:
                raise ValueError
            spend()
            if is_size(of):  # a tuple, and the most frequent
                (shape,) = args
                if type(shape) is not tuple:  # never a copy: of a long list it would cost much
                    raise ValueError
                push(shape)
            else:
                push(Instance(of, args, new=op == 0x81))
        elif op == 0x62:  # BUILD
            state = stack.pop()
            target = stack[-1]
            if type(target) is not Instance or target.state is not None:
                raise ValueError
            target.state = state
        elif op == 0x75 or op == 0x73:  # SETITEMS, SETITEM
            if op == 0x75:
                values = stack
                stack = marks.pop()
                push = stack.append
            else:
                values = stack[-2:]
                del stack[-2:]
            target = stack[-1]
            keys = values[::2]
            for key in keys:
                if type(key) is not str and not is_key(key):
                    raise _Refused(f"has a {type(key).__name__} as a key; no checkpoint needs that")
            pairs = zip(keys, values[1::2], strict=True)
            if type(target) is dict:
                if fold is not None and keys and type(keys[0]) is Instance:
                    target.update([fold(key, value) for key, value in pairs])
                else:
                    target.update(pairs)
            elif type(target) is Instance:
                target.add(list(pairs))
            else:
                raise ValueError
        elif op == 0x85 or op == 0x86 or op == 0x87:  # TUPLE1, TUPLE2, TUPLE3
            count = op - 0x84
            if len(stack) < count:
                raise ValueError
            spend()
            stack[-count:] = (tuple(stack[-count:]),)
        elif op == 0x4D:  # BININT2
            push(u16(data, pos)[0])
            pos += 2
        elif op == 0x8C or op == 0x58:  # SHORT_BINUNICODE, BINUNICODE
            size = data[pos] if op == 0x8C else u32(data, pos)[0]
            pos += 1 if op == 0x8C else 4
            push(str(data[pos : pos + size], "utf-8", "surrogatepass"))
            pos += size
        elif op == 0x8A or op == 0x8B:  # LONG1, LONG4
            size = data[pos] if op == 0x8A else u32(data, pos)[0]
            pos += 1 if op == 0x8A else 4
            if size > MAX_INT_BYTES:
                raise _Refused(f"holds an integer of {size} bytes; no checkpoint needs that")
            push(int.from_bytes(data[pos : pos + size], "little", signed=True))
            pos += size
        elif op == 0x74:  # TUPLE
            values = stack
            stack = marks.pop()
            push = stack.append
            spend()
            push(tuple(values))
        elif op == 0x88 or op == 0x89:  # NEWTRUE, NEWFALSE
            push(op == 0x88)
        elif op == 0x4E:  # NONE
            push(None)
        elif op == 0x5D:  # EMPTY_LIST
            spend()
            push([])
        elif op == 0x65 or op == 0x61:  # APPENDS, APPEND
            if op == 0x65:
                values = stack
                stack = marks.pop()
                push = stack.append
            else:
                values = [stack.pop()]
            target = stack[-1]
            if type(target) is list:
                target.extend(values)
            elif type(target) is Instance:
                target.add(values)
            else:
                raise ValueError
        elif op == 0x63:  # GLOBAL
            module, name, _ = data[pos : pos + 512].split(b"\n", 2)
            pos += len(module) + len(name) + 2
            push(find(str(module, "utf-8"), str(name, "utf-8")))
        elif op == 0x93:  # STACK_GLOBAL
            last = stack.pop()
            push(find(stack.pop(), last))
        elif op == 0x95:  # FRAME: only a hint for buffering
            pos += 8
        elif op == 0x47:  # BINFLOAT
            push(struct.unpack_from(">d", data, pos)[0])
            pos += 8
        elif op == 0x51 and persistent:  # BINPERSID
            pid = stack.pop()
            if type(pid) is not tuple:
                raise ValueError
            spend()
            push(Instance(PERSISTENT, pid))
        elif op == 0x43 or op == 0x42:  # SHORT_BINBYTES, BINBYTES
            size = data[pos] if op == 0x43 else u32(data, pos)[0]
            pos += 1 if op == 0x43 else 4
            push(data[pos : pos + size])
            pos += size
        elif op == 0x80:  # PROTO
            if not 2 <= data[pos] <= 5:
                raise _Refused(f"is a pickle of protocol {data[pos]}; torch writes 2 to 5")
            pos += 1
        elif op == 0x2E:  # STOP
            (value,) = stack
            return value
        else:
            raise _Refused(
                f"uses pickle opcode 0x{op:02x}, which no checkpoint needs; "
                "do not load it with torch either"
            )


def is_size(of: Global) -> bool:
    """Whether this names `torch.Size`, which is read as a plain tuple."""
    return of.name == "Size" and of.module == "torch"


def is_key(key: Any) -> bool:
    """Whether a value may be a key: none whose hash a file could make slow or collide.

    Strings are hashed with a secret; small integers hash to themselves. Tuples and large
    integers can be made to collide by the thousand, and a nested tuple to take for ever.
    """
    return type(key) in _KEYS or (type(key) is int and -(1 << 60) < key < 1 << 60)
