"""Reports as an audit of real models would give them, made from the plan of a published config."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

from mtpconv.audit.finding import (
    Compared,
    Finding,
    MtpDepth,
    MtpStatus,
    Report,
    Side,
)
from mtpconv.mapping.plan import Plan, make_plan
from mtpconv.mapping.table_reader import find_table
from mtpconv.tensors import ROOT, Region
from tests.conftest import ROOT as CHECKOUT

#: Names that a checkpoint may hold and that every report must survive.
HOSTILE = (
    "\x1b[2J\x1b]0;owned\x07model.weight",
    "</script><script>window.owned=1</script>",
    '"><img src=x onerror=window.owned=1>',
    "::error file=x::owned",
    "##[error]owned",
    "##vso[task.setvariable variable=owned]1",
    "a\n::stop-commands::owned\r\n::warning::owned",
    "a%0A::error::owned",
    "]]><x/>&amp;&#0;\x00\x08\ufffe\ud800",
    "`|[x](javascript:owned) @owned ![](https://owned.example/x) <b>",
    "\u202egnp.exe\u2066\u200b\u2028line",
    "{{constructor}} ${owned} $(owned) %s %(x)s {0}",
    "model.layers.999999999999999999999.x",
    "",
    " ",
    "x" * 5000,
    "__proto__",
    "model.layers.0.constructor.weight",
)


@cache
def glm52() -> Plan:
    """The plan of GLM-5.2: 59,585 tensors, 791 of them MTP."""
    config = json.loads((CHECKOUT / "fixtures/configs/glm-5.2.json").read_text("utf-8"))
    return make_plan(config, find_table("glm_moe_dsa"))


@cache
def passing() -> Report:
    """Everything identical."""
    plan = glm52()
    nbytes = sum(spec.nbytes for spec in plan.hf.values())
    mtp = sum(region.kind == "mtp" for region in plan.regions.values())
    return Report(
        verdict="pass",
        tier="L2",
        mtp=MtpStatus("preserved", 1, (MtpDepth(0, "preserved", mtp, mtp),)),
        findings=(),
        compared=Compared(len(plan.hf), nbytes),
        before=Side("GLM-5.2", "hf", len(plan.hf), nbytes),
        after=Side("export", "hf", len(plan.hf), nbytes),
        model_type="glm_moe_dsa",
        states=dict.fromkeys(plan.hf, "identical"),
        regions=dict(plan.regions),
        checked=("missing_tensor", "extra_tensor", "value_mismatch", "config_mismatch"),
    )


@cache
def mtp_dropped() -> Report:
    """What save_pretrained does: all MTP tensors gone, the config still promises them."""
    whole = passing()
    lost = [name for name, region in whole.regions.items() if region.kind == "mtp"]
    return replace(
        whole,
        verdict="fail",
        mtp=MtpStatus("absent", 1, (MtpDepth(0, "absent", 0, len(lost)),)),
        findings=(
            *(missing(name, whole.regions[name]) for name in lost),
            Finding(
                "P01",
                "mtp_missing",
                "error",
                "config.json: num_nextn_predict_layers is 1 but MTP depth 0 (model.layers.78) "
                f"has 0 of {len(lost)} tensors",
                file="config.json",
                field="num_nextn_predict_layers",
                layer=78,
                region=Region("mtp", 0),
                hint="the config promises what the exporter left out",
            ),
            Finding(
                "F08",
                "index_total_size",
                "warning",
                "model.safetensors.index.json: total_size is 1 byte short",
                file="model.safetensors.index.json",
            ),
        ),
        compared=Compared(len(whole.states) - len(lost), 10**12, notes=("configs compared",)),
        states={**whole.states, **dict.fromkeys(lost, "missing")},
    )


def missing(name: str, region: Region) -> Finding:
    """A tensor that only the reference has."""
    return Finding(
        "T01", "missing_tensor", "error", f"{name}: is not in after", name, region=region,
        hint="the whole depth is gone",
    )  # fmt: skip


@cache
def scattered() -> Report:
    """Many different faults all over the model, some of them waived."""
    whole = passing()
    names = list(whole.regions)
    changed = names[5::97]
    narrowed = names[11::1201]
    findings = [
        Finding(
            "T05",
            "value_mismatch",
            "error",
            f"{name}: {number + 1} of 4,096 elements differ, the first at {number}",
            name,
            region=whole.regions[name],
            before="3f80",
            after="3f81",
        )
        for number, name in enumerate(changed)
    ]
    findings += [
        Finding(
            "T03", "dtype_mismatch", "error", f"{name}: F32 became BF16", name, before="F32",
            after="BF16", region=whole.regions[name], waived="router bias is rounded on purpose",
        )
        for name in narrowed
    ]  # fmt: skip
    findings.append(
        Finding(
            "C01", "config_mismatch", "error",
            "config.json: rope_parameters.rope_theta was 8000000, is 1000000",
            file="config.json", field="rope_parameters.rope_theta", before=8000000, after=1000000,
            hint="the default of another model",
        )
    )  # fmt: skip
    findings.append(Finding("E03", "engine_note", "note", "vllm takes the head from the trunk"))
    states = {**whole.states, **dict.fromkeys(changed, "changed")}
    return replace(
        whole,
        verdict="fail",
        findings=tuple(findings),
        switches=("copies",),
        states={**states, **dict.fromkeys(narrowed, "dtype")},
    )


def hostile() -> Report:
    """Every hostile name as tensor, file, field, message, hint, value and path."""
    findings = tuple(
        Finding(
            "T02", "extra_tensor", "error", f"{name}: is only in after", name, name, name,
            region=ROOT, before=name, after={name: [name, float("nan")]}, hint=f"remove {name}",
            tensors=(name, name + "x"),
        )
        for name in HOSTILE
    )  # fmt: skip
    odd = [
        Finding(HOSTILE[3], HOSTILE[4], "warning", HOSTILE[6], waived=HOSTILE[0]),
        Finding(HOSTILE[1], HOSTILE[2], "note", HOSTILE[8], file=HOSTILE[9]),
    ]
    regions: Mapping[str, Region] = {name: Region(HOSTILE[1]) for name in HOSTILE}
    return Report(
        verdict="fail",
        tier="L0",
        mtp=MtpStatus(HOSTILE[0], None, (MtpDepth(0, HOSTILE[6], 1, None, HOSTILE[1]),)),
        findings=(*findings, *odd),
        compared=Compared(1, 1, not_read=HOSTILE, notes=HOSTILE),
        before=None,
        after=Side(HOSTILE[6], HOSTILE[3], 1, 1, HOSTILE[1]),
        model_type=HOSTILE[1],
        switches=HOSTILE,
        states={name: HOSTILE[number % 5] for number, name in enumerate(HOSTILE)},
        regions=regions,
        checked=HOSTILE,
    )


def incomplete() -> Report:
    """One checkpoint alone, of a model that nobody wrote a table for."""
    note = Finding("A04", "completeness_not_checked", "note", "there is no mapping table")
    return replace(passing(), tier="L0", before=None, findings=(note,),
                   states=dict.fromkeys(passing().states, "present"))  # fmt: skip


def not_checked() -> Report:
    """Nothing could be compared."""
    fault = Finding(
        "F01", "unreadable_file", "error",
        "model-00001-of-00002.safetensors: ends after 1,024 of 5,368,709,120 bytes",
        file="model-00001-of-00002.safetensors", hint="a download that was cut off",
    )  # fmt: skip
    return Report(
        verdict="error",
        tier="none",
        mtp=MtpStatus("unknown", None),
        findings=(fault,),
        compared=Compared(),
        before=None,
        after=Side("export", "hf", 0, 0),
    )


#: Every sort of report, by name.
ALL: Mapping[str, Callable[[], Report]] = {
    "passing": passing,
    "mtp_dropped": mtp_dropped,
    "scattered": scattered,
    "hostile": hostile,
    "not_checked": not_checked,
}
