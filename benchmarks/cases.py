"""What is measured: each case gives figures by name, every one a list with one entry a round."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import measure as m
from benchmarks import model

Figures = dict[str, list[float]]


class Place:
    """Where the models and the results of runs lie; made once, kept until removed."""

    def __init__(self, folder: Path, rounds: int) -> None:
        self.folder = folder
        self.rounds = rounds
        folder.mkdir(parents=True, exist_ok=True)

    def out(self, name: str) -> Path:
        """A folder to write into, absent now."""
        target = self.folder / f"out_{name}"
        m.remove(target)
        return target

    def large(self) -> Path:
        """The model that is measured."""
        return model.large(self.folder / "large")

    def converted(self) -> Path:
        """The same as torch_dist."""
        return self._converted(self.large())

    def coarse(self) -> tuple[Path, Path]:
        """As many bytes in a tenth of the tensors, in both formats."""
        hf = model.coarse(self.folder / "coarse")
        return hf, self._converted(hf)

    def _converted(self, hf: Path) -> Path:
        target = hf.with_name(f"{hf.name}_mcore")
        if not target.exists():
            m.mtpconv("hf2mcore", hf, target, "--quiet", "--no-verify")
        return target


def _rounds(place: Place, runs: dict[str, Callable[[], m.Cost]]) -> dict[str, list[m.Cost]]:
    """Every run once a round, each round beginning with another one."""
    names = list(runs)
    found: dict[str, list[m.Cost]] = {name: [] for name in names}
    for number in range(place.rounds):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            found[name].append(runs[name]())
            print(f"  {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    return found


def _conversions(
    place: Place, hf: Path, mcore: Path, **more: tuple[str, ...]
) -> dict[str, list[m.Cost]]:
    """`cp` of an HF folder, its conversions, and hf2mcore once `more` for each set of options."""
    size = m.size_of(hf)

    def run(source: Path, work: Callable[[Path], m.Cost]) -> Callable[[], m.Cost]:
        def go() -> m.Cost:
            target = place.out("convert")
            m.warm(source)
            m.touch_memory(size + size // 4)
            cost = work(target)
            m.remove(target)
            return cost

        return go

    def convert(name: str, source: Path, *options: str) -> Callable[[], m.Cost]:
        return run(source, lambda target: m.mtpconv(name, source, target, "--quiet", *options))

    return _rounds(place, {
        "cp": run(hf, lambda target: m.copy(hf, target)),
        "hf2mcore_plain": convert("hf2mcore", hf, "--no-verify"),
        "mcore2hf_plain": convert("mcore2hf", mcore, "--no-verify"),
        "hf2mcore": convert("hf2mcore", hf),
        "mcore2hf": convert("mcore2hf", mcore),
        **{name: convert("hf2mcore", hf, *options) for name, options in more.items()},
    })  # fmt: skip


_WAYS = ("hf2mcore_plain", "mcore2hf_plain", "hf2mcore", "mcore2hf")


def conversion(place: Place) -> Figures:
    """Both conversions against `cp` of the same bytes on the same filesystem."""
    hf = place.large()
    size = m.size_of(hf)
    costs = _conversions(
        place, hf, place.converted(), hf2mcore_one_job=("--no-verify", "--jobs", "1")
    )
    figures: Figures = {"gigabytes": [size / 1e9]}
    cp = [c.wall for c in costs["cp"]]
    figures["cp GB/s"] = [size / 1e9 / w for w in cp]
    figures["cp CPU s/GB"] = [c.cpu / size * 1e9 for c in costs["cp"]]
    for name in _WAYS:
        figures[f"{name} / cp"] = [c / r.wall for c, r in zip(cp, costs[name], strict=True)]
        figures[f"{name} CPU s/GB"] = [c.cpu / size * 1e9 for c in costs[name]]
        figures[f"{name} anonymous MB"] = [c.anonymous / 1e6 for c in costs[name]]
        figures[f"{name} resident MB"] = [c.resident / 1e6 for c in costs[name]]
    one, two = costs["hf2mcore_one_job"], costs["hf2mcore_plain"]
    figures["conversion two jobs / one"] = [a.wall / b.wall for a, b in zip(one, two, strict=True)]
    return figures


def coarse(place: Place) -> Figures:
    """The same in a tenth of the tensors: what is paid for each byte, not for each tensor."""
    hf, mcore = place.coarse()
    size = m.size_of(hf)
    costs = _conversions(place, hf, mcore)
    figures: Figures = {"coarse gigabytes": [size / 1e9]}
    figures["coarse cp CPU s/GB"] = [c.cpu / size * 1e9 for c in costs["cp"]]
    for name in _WAYS:
        pairs = zip(costs["cp"], costs[name], strict=True)
        figures[f"coarse {name} / cp"] = [a.wall / b.wall for a, b in pairs]
        figures[f"coarse {name} CPU s/GB"] = [c.cpu / size * 1e9 for c in costs[name]]
    return figures


def memory(place: Place) -> Figures:
    """The same number of tensors with a quarter of the bytes: memory must not follow."""
    small = model.large(place.folder / "quarter", hidden=128)
    target = place.out("memory")
    there = m.mtpconv("hf2mcore", small, target, "--quiet")
    back = m.mtpconv("mcore2hf", target, place.out("memory_back"), "--quiet")
    m.remove(target, place.folder / "out_memory_back")
    return {
        "quarter hf2mcore anonymous MB": [there.anonymous / 1e6],
        "quarter mcore2hf anonymous MB": [back.anonymous / 1e6],
    }


_DIGESTS = """
import sys
from pathlib import Path
from mtpconv.store.hf import open_hf
from mtpconv.store.manifest import take_manifest
opened = open_hf(Path(sys.argv[1]))
take_manifest(opened, opened.path, opened.format, workers=int(sys.argv[2]))
"""


def audit(place: Place) -> Figures:
    """Reading: digests of one side, two sides, and across the formats."""
    return _audits(place, place.large(), place.converted())


def coarse_audit(place: Place) -> Figures:
    """The same with larger tensors."""
    found = _audits(place, *place.coarse())
    return {f"coarse {name}": values for name, values in found.items()}


def _audits(place: Place, hf: Path, mcore: Path) -> Figures:
    twin = hf.with_name(f"{hf.name}_twin")
    if not twin.exists():
        m.copy(hf, twin)

    def digests(jobs: int) -> m.Cost:
        return m.run([sys.executable, "-c", _DIGESTS, str(hf), str(jobs)])

    def cold(work: Callable[[], m.Cost]) -> Callable[[], m.Cost]:
        def run() -> m.Cost:
            m.cool(hf)
            return work()

        return run

    def hot(work: Callable[[], m.Cost], *folders: Path) -> Callable[[], m.Cost]:
        def run() -> m.Cost:
            for folder in folders or (hf,):
                m.warm(folder)
            return work()

        return run

    costs = _rounds(place, {
        "read cold": cold(lambda: m.read(hf)),
        "digests cold": cold(lambda: digests(2)),
        "read warm": hot(lambda: m.read(hf)),
        "digests warm, one job": hot(lambda: digests(1)),
        "digests warm, two jobs": hot(lambda: digests(2)),
        "audit HF HF": hot(lambda: m.mtpconv("audit", hf, twin, "--quiet"), hf, twin),
        "audit HF torch_dist": hot(lambda: m.mtpconv("audit", hf, mcore, "--quiet"), hf, mcore),
    })  # fmt: skip
    walls = {name: [c.wall for c in found] for name, found in costs.items()}

    def ratio(one: str, other: str, factor: float = 1.0) -> list[float]:
        return [factor * a / b for a, b in zip(walls[one], walls[other], strict=True)]

    size = m.size_of(hf) / 1e9
    return {
        "page cache GB/s": [size / w for w in walls["read warm"]],
        "disk GB/s": [size / w for w in walls["read cold"]],
        "audit cold / read": ratio("read cold", "digests cold"),
        "audit warm / read, one job": ratio("read warm", "digests warm, one job"),
        "audit warm / read, two jobs": ratio("read warm", "digests warm, two jobs"),
        "audit two jobs / one": ratio("digests warm, one job", "digests warm, two jobs"),
        "audit bytes / digests of both": ratio("digests warm, two jobs", "audit HF HF", 2.0),
        "audit across / audit HF HF": ratio("audit HF HF", "audit HF torch_dist"),
    }


def planning(place: Place) -> Figures:
    """All of DeepSeek-V3's expert chunks with hardly a byte in them, and twice as many."""
    figures: Figures = {}
    for name, experts in (("once", 256), ("twice", 512)):
        hf = model.tiny(place.folder / f"v3_{experts}", "deepseek-v3", n_routed_experts=experts)
        there, back = place.out("planning"), place.out("planning_back")
        found: list[m.Cost] = []
        returned: list[m.Cost] = []
        for _ in range(place.rounds):
            m.remove(there, back)
            found.append(m.mtpconv("hf2mcore", hf, there, "--quiet"))
            returned.append(m.mtpconv("mcore2hf", there, back, "--quiet"))
        figures[f"planning hf2mcore {name} CPU s"] = [c.cpu for c in found]
        figures[f"planning mcore2hf {name} CPU s"] = [c.cpu for c in returned]
        m.remove(there, back)
    for way in ("hf2mcore", "mcore2hf"):
        once, twice = (figures[f"planning {way} {n} CPU s"] for n in ("once", "twice"))
        figures[f"planning {way} twice / once"] = [b / a for a, b in zip(once, twice, strict=True)]
    return figures


def starting(place: Place) -> Figures:
    """How long the answers take that need no weights."""
    config = str(model.CONFIGS / "glm-5.2.json")
    runs: dict[str, Callable[[], m.Cost]] = {
        "python": lambda: m.run([sys.executable, "-c", ""]),
        "--version": lambda: m.mtpconv("--version"),
        "--help": lambda: m.mtpconv("--help"),
        "audit --help": lambda: m.mtpconv("audit", "--help"),
        "plan GLM-5.2": lambda: m.mtpconv("plan", config),
    }
    if _installed("torch"):
        runs["import torch"] = lambda: m.run([sys.executable, "-c", "import torch"])
    costs = _rounds(place, runs)
    figures = {f"start {n} ms": [1000 * c.wall for c in found] for n, found in costs.items()}
    if "import torch" in costs:
        for name in ("--version", "--help", "audit --help"):
            pairs = zip(costs[name], costs["import torch"], strict=True)
            figures[f"start {name} / import torch"] = [a.wall / b.wall for a, b in pairs]
    return figures


_BASELINES = {
    "safetensors load_file + save_file": """
import sys, glob
from safetensors.torch import load_file, save_file
for i, path in enumerate(sorted(glob.glob(sys.argv[1] + "/*.safetensors"))):
    save_file(load_file(path), f"{sys.argv[2]}/{i}.safetensors")
""",
    "torch DCP save": """
import sys, glob, torch
from safetensors.torch import load_file
import torch.distributed.checkpoint as dcp
state = {}
for path in sorted(glob.glob(sys.argv[1] + "/*.safetensors")):
    state.update(load_file(path))
dcp.save(state, checkpoint_id=sys.argv[2])
""",
    "megatron-core dist_checkpointing.save": """
import sys, glob, re, tempfile, torch
import torch.distributed as dist
def main():
    from safetensors.torch import load_file
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing import ShardedTensor
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    dist.init_process_group("gloo", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
    state = {}
    for path in sorted(glob.glob(sys.argv[1] + "/*.safetensors")):
        for name, value in load_file(path).items():
            found = re.search(r"(.*experts)\\.(\\d+)\\.(.*)", name)
            if found:
                key, at = f"{found[1]}.{found[3]}", int(found[2])
                value = ShardedTensor.from_rank_offsets(
                    key, value, (0, at, EXPERTS), prepend_axis_num=1)
            else:
                value = ShardedTensor.from_rank_offsets(name, value)
            state[name] = value
    dist_checkpointing.save(state, sys.argv[2])
EXPERTS = 240
if __name__ == "__main__":
    main()
""",
}


_ONE_THREAD = """
import os
os.environ["OMP_NUM_THREADS"] = "1"
"""
_SYNC = """
if __name__ == "__main__":
    for folder, _, names in os.walk(sys.argv[2]):
        for name in names:
            with open(os.path.join(folder, name), "rb") as file:
                os.fsync(file.fileno())
"""


def baselines(place: Place) -> Figures:
    """Other ways to write the same bytes, once each, on an eighth of the bytes and layers."""
    config = {**model.published("deepseek-v3"), **model.WIDTHS, "num_hidden_layers": 4}
    hf = model.make_model(place.folder / "eighth", config, 2)
    size = m.size_of(hf)
    figures: Figures = {"baseline gigabytes": [size / 1e9]}

    def note(name: str, cost: m.Cost) -> None:
        figures[f"baseline {name} GB/s"] = [size / 1e9 / cost.wall]
        figures[f"baseline {name} CPU s/GB"] = [cost.cpu / size * 1e9]
        figures[f"baseline {name} resident MB"] = [cost.resident / 1e6]

    for name, needs, run in _baseline_runs(place, hf):
        if not _installed(needs):
            continue
        m.warm(hf)
        m.touch_memory(2 * size)
        try:
            note(name, run())
        except RuntimeError as error:
            print(f"  {name}: {str(error)[-300:]}", file=sys.stderr)
    return figures


def _baseline_runs(place: Place, hf: Path) -> Iterator[tuple[str, str, Callable[[], m.Cost]]]:
    out = place.out("baseline")
    yield "cp", "mtpconv", lambda: m.copy(hf, place.out("baseline"))
    yield (
        "mtpconv hf2mcore",
        "mtpconv",
        lambda: m.mtpconv("hf2mcore", hf, place.out("baseline"), "--quiet", "--no-verify"),
    )
    for name, program in _BASELINES.items():
        script = place.folder / "baseline.py"

        def run(program: str = program, script: Path = script) -> m.Cost:
            script.write_text(_ONE_THREAD + program + _SYNC)
            place.out("baseline").mkdir()
            return m.run([sys.executable, str(script), str(hf), str(out)])

        yield name, "megatron" if "megatron" in name else "torch", run
    m.remove(out)


def _installed(module: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(module) is not None


CASES: dict[str, Callable[[Place], Figures]] = {
    "conversion": conversion, "coarse": coarse, "memory": memory, "audit": audit,
    "coarse-audit": coarse_audit,
    "planning": planning, "starting": starting, "baselines": baselines,
}  # fmt: skip
