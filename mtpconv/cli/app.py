"""The typer application: every command with its options; work is imported when it runs.

No `from __future__ import annotations` here: at every start typer would compile each annotation of
each command again, four times: an eighth of what `mtpconv --help` takes.
"""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup, TyperOption

from mtpconv import __version__
from mtpconv.cli.places import path, place, report_file, target

_Place = partial(typer.Argument, parser=place)
_PlaceOption = partial(typer.Option, parser=place)
_Target = partial(typer.Argument, parser=target)
_Path = partial(typer.Argument, parser=path)
_PathOption = partial(typer.Option, parser=path)


class _Group(TyperGroup):
    """All commands."""

    def get_help_option(self, ctx: Any) -> TyperOption | None:
        """The --help of mtpconv itself: False if it is not given, as for any other flag.

        Typer's own is None then, and to see that None is no bool it imports pydantic, which took
        a third of the time of `mtpconv COMMAND --help`.
        """
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False
        return option


app = typer.Typer(
    name="mtpconv",
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "Convert checkpoints between HuggingFace and Megatron-Core without losing the MTP "
        "module, and prove it.\n\n"
        "Exit codes: 0 checked and right, 1 findings or refused, 2 usage, 3 could not read, "
        "write or check, 70 internal error."
    ),
)

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
Mapping = Annotated[
    Path | None, _PathOption("--mapping", help="Your own mapping table (docs/mapping.md).")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing DST.")]
DropMtp = Annotated[
    bool,
    typer.Option("--drop-mtp", help="Leave MTP out on purpose; the written config then says 0."),
]
Fp8 = Annotated[
    str,
    typer.Option(
        "--fp8",
        help="Block FP8: keep codes and scales (default), requantise what changed with fresh "
        "scales, or bf16 (docs/fp8.md).",
    ),
]
NoVerify = Annotated[
    bool, typer.Option("--no-verify", help="Do not read the output back and compare it.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything, write nothing, say what it needs.")
]
Jobs = Annotated[
    int | None,
    typer.Option("--jobs", "-j", min=1, help="Threads that copy (default: one per core, up to 8)."),
]
ReadingJobs = Annotated[
    int | None,
    typer.Option("--jobs", "-j", min=1, help="Threads that read (default: one per core, up to 8)."),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on where an interrupted run stopped, and keep what is done if this one stops.",
    ),
]
Meet = Annotated[
    Path | None,
    _PathOption(
        metavar="DIR",
        help="Of several ranks (srun, torchrun): a folder that all see and write (default: the "
        "current one).",
    ),
]
LogFormat = Annotated[
    str,
    typer.Option(
        "--log-format",
        metavar="auto|text|json",
        help="Progress: a bar or lines (auto), lines, or one JSON object a line for clusters.",
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mtpconv {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version


@app.command()
def hf2mcore(
    src: Annotated[
        str, _Place(help="HuggingFace folder (safetensors), or hf://, s3://, https://, ...")
    ],
    dst: Annotated[Path, _Path(help="Folder to write; gets release/ and hf_source/.")],
    layout: Annotated[
        str | None,
        typer.Option(
            help="How Megatron spells the model: training (default), local, canonical, or "
            "dialect names joined by commas."
        ),
    ] = None,
    iteration: Annotated[
        int | None, typer.Option(min=0, help="Write iter_NNNNNNN/ instead of release/.")
    ] = None,
    mapping: Mapping = None,
    drop_mtp: DropMtp = False,
    fp8: Fp8 = "keep",
    pad_vocab: Annotated[
        int,
        typer.Option(
            min=1,
            help="Pad embedding and LM head with zero rows to a multiple: Megatron's "
            "make-vocab-size-divisible-by (128) times the tensor-parallel size of the run.",
        ),
    ] = 1,
    overwrite: Overwrite = False,
    no_verify: NoVerify = False,
    dry_run: DryRun = False,
    jobs: Jobs = None,
    resume: Resume = False,
    log_format: LogFormat = "auto",
    quiet: Quiet = False,
) -> None:
    """Convert a HuggingFace folder to a Megatron-Core torch_dist checkpoint.

    Every tensor is moved byte for byte, MTP included, then read back and compared.
    """
    from mtpconv.cli.convert import run_hf2mcore

    run_hf2mcore(
        src, dst, layout=layout, iteration=iteration, mapping=mapping, drop_mtp=drop_mtp, fp8=fp8,
        pad_vocab=pad_vocab, overwrite=overwrite, verify=not no_verify, dry_run=dry_run, jobs=jobs,
        resume=resume, log_format=log_format, quiet=quiet,
    )  # fmt: skip


@app.command()
def mcore2hf(
    src: Annotated[
        str, _Place(help="torch_dist folder (parent, iter_* or release), or s3://, ...")
    ],
    dst: Annotated[str, _Target(help="HuggingFace folder to write, or s3://, gs://, ...")],
    like: Annotated[
        str | None,
        _PlaceOption(
            help="Where config, tokenizer and shard layout come from, if SRC has no hf_source/: "
            "the original HuggingFace folder or a saved hf_source, or hf://ORG/MODEL, s3://, ..."
        ),
    ] = None,
    mapping: Mapping = None,
    drop_mtp: DropMtp = False,
    frozen_vision: Annotated[
        bool,
        typer.Option(
            help="The vision tower was not trained: leave Megatron's out and write the one that "
            "travelled in hf_source."
        ),
    ] = False,
    fp8: Fp8 = "keep",
    overwrite: Overwrite = False,
    no_verify: NoVerify = False,
    dry_run: DryRun = False,
    jobs: Jobs = None,
    resume: Resume = False,
    log_format: LogFormat = "auto",
    quiet: Quiet = False,
) -> None:
    """Convert a Megatron-Core torch_dist checkpoint to a HuggingFace folder.

    With unchanged weights the files are those of the original, byte for byte.
    """
    from mtpconv.cli.convert import run_mcore2hf

    run_mcore2hf(
        src, dst, like=like, mapping=mapping, drop_mtp=drop_mtp, frozen_vision=frozen_vision,
        fp8=fp8, overwrite=overwrite, verify=not no_verify, dry_run=dry_run, jobs=jobs,
        resume=resume, log_format=log_format, quiet=quiet,
    )  # fmt: skip


@app.command()
def roundtrip(
    src: Annotated[Path, _Path(help="HuggingFace folder.")],
    layout: Annotated[str | None, typer.Option(help="As for hf2mcore.")] = None,
    mapping: Mapping = None,
    workdir: Annotated[
        Path | None, _PathOption(help="Where the temporary copies go (default: TMPDIR).")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Convert to Megatron and back in a temporary place, audit the result and compare files."""
    from mtpconv.cli.convert import run_roundtrip

    run_roundtrip(src, layout=layout, mapping=mapping, workdir=workdir, quiet=quiet)


@app.command()
def plan(
    model: Annotated[
        str, _Place(help="config.json, a checkpoint folder, or hf://ORG/MODEL, s3://, ...")
    ],
    rows: Annotated[bool, typer.Option("--rows", help="Print every tensor.")] = False,
    mapping: Mapping = None,
) -> None:
    """Show what a model must hold: tensors, parameters and bytes per region, MTP apart."""
    from mtpconv.cli.plan import run_plan

    run_plan(model, rows=rows, mapping=mapping)


@app.command()
def check(
    table: Annotated[Path, _Path(help="A mapping table, or a model_type.")],
    config: Annotated[Path | None, _PathOption(help="config.json to expand it for.")] = None,
    inventory: Annotated[
        Path | None,
        _PathOption(help="model.safetensors.index.json, manifest or folder to cover."),
    ] = None,
) -> None:
    """Run the static rules over a mapping table; no weights are needed."""
    from mtpconv.cli.plan import run_check

    run_check(table, config=config, inventory=inventory)


@app.command()
def families(
    form: Annotated[str, typer.Option("--format", help="text, json or markdown.")] = "text",
) -> None:
    """List the model types with a mapping table: MTP depths, directions, proofs, releases."""
    from mtpconv.cli.plan import run_families

    run_families(form)


@app.command()
def inventory(
    checkpoint: Annotated[
        str, _Place(help="HuggingFace or torch_dist folder, or hf://ORG/MODEL, s3://, ...")
    ],
    output: Annotated[
        Path | None, _PathOption("--output", "-o", help="Where to write the manifest.")
    ] = None,
    files: Annotated[
        bool, typer.Option("--files", help="Also sha256 of every file, as sha256sum shows it.")
    ] = False,
    jobs: ReadingJobs = None,
    meet: Meet = None,
    quiet: Quiet = False,
) -> None:
    """Write a manifest: name, dtype, shape and BLAKE3 of every tensor, one root over all."""
    from mtpconv.cli.inventory import run_inventory

    run_inventory(checkpoint, output=output, files=files, quiet=quiet, jobs=jobs, meet=meet)


@app.command()
def synth(
    config: Annotated[Path, _Path(help="config.json of the model to imitate.")],
    dst: Annotated[Path, _Path(help="HuggingFace folder to write.")],
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.")] = 0,
    shards: Annotated[int, typer.Option(min=1, help="Number of shards.")] = 4,
    full_width: Annotated[
        bool, typer.Option("--full-width", help="Keep the widths; beware of the size.")
    ] = False,
    layers: Annotated[int | None, typer.Option(min=1, help="Fewer trunk layers.")] = None,
    experts: Annotated[int | None, typer.Option(min=1, help="Fewer experts.")] = None,
    mapping: Mapping = None,
) -> None:
    """Write a small random checkpoint with all tensor names of a model, to try things on."""
    from mtpconv.cli.plan import run_synth

    run_synth(
        config, dst, seed=seed, shards=shards, full_width=full_width, layers=layers,
        experts=experts, mapping=mapping,
    )  # fmt: skip


@app.command()
def audit(
    before: Annotated[
        str,
        _Place(help="The reference, or the only checkpoint if AFTER is left out."),
    ],
    after: Annotated[
        str | None,
        _Place(help="What is to be trusted: folder, saved manifest, or a URL (L0)."),
    ] = None,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="On standard output: text, json, markdown, junit, sarif, html, github.",
        ),
    ] = "text",
    report: Annotated[
        list[str] | None,
        typer.Option(
            parser=report_file,
            metavar="FORMAT=FILE",
            help="Also write a file; may be given several times.",
        ),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            help="Switch on a named exception: copies, tied-heads, upcast, expert-layout, "
            "vocab-padding, index-authoritative, config. Recorded in the report."
        ),
    ] = None,
    expect: Annotated[
        str,
        typer.Option(
            metavar="bytes|structure",
            help="structure: after training, values may differ; MTP that did not move warns.",
        ),
    ] = "bytes",
    base: Annotated[
        str | None, _PlaceOption(help="Checkpoint that AFTER was trained from: finds stale MTP.")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(metavar="vllm|sglang|transformers", help="What an engine would do with it."),
    ] = None,
    require: Annotated[
        str | None, typer.Option(metavar="L0|L1|L2", help="Exit 3 unless this tier was reached.")
    ] = None,
    headers_only: Annotated[
        bool, typer.Option("--headers-only", help="Tier L0: read no tensor bytes.")
    ] = False,
    sample: Annotated[
        str | None,
        typer.Option(help="Of two, read n of every N tensors (n/N); MTP is always read."),
    ] = None,
    waivers: Annotated[
        Path | None, _PathOption(help="TOML of accepted findings, each with an expiry date.")
    ] = None,
    manifest: Annotated[
        Path | None, _PathOption(help="The manifest that --attest speaks of.")
    ] = None,
    attest: Annotated[
        Path | None, _PathOption(help="Write an in-toto test-result statement.")
    ] = None,
    mapping: Mapping = None,
    jobs: ReadingJobs = None,
    meet: Meet = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print every line.")] = False,
    quiet: Quiet = False,
) -> None:
    """Compare two checkpoints byte for byte, or one with its own config; MTP above all.

    HuggingFace against Megatron goes through the mapping table; nothing is converted. Of
    hf://ORG/MODEL, https:// and s3:// only config, index and headers are read, of a torch_dist
    checkpoint there .metadata and the common state.
    """
    from mtpconv.cli.audit import run_audit

    run_audit(
        before if after is not None else None,
        after if after is not None else before,
        base=base, mapping=mapping, report=report or (), form=form, attestation=attest,
        manifest=manifest, verbose=verbose, quiet=quiet, allow=allow or (), expect=expect,
        headers_only=headers_only, sample=sample, require=require, profile=profile,
        waivers=waivers, jobs=jobs, meet=meet,
    )  # fmt: skip


@app.command()
def parity(
    hf: Annotated[Path, _Path(help="HuggingFace folder: the reference.")],
    mcore: Annotated[Path, _Path(help="torch_dist folder of the same model.")],
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="float32 (default on CPU) or bfloat16 (default on CUDA).")
    ] = None,
    prompts: Annotated[
        Path | None, _PathOption(help="Text file, a prompt per line; else seeded random tokens.")
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=2, help="Tokens; default: longer than index_topk.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows of random tokens.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the random tokens.")] = 0,
    max_abs: Annotated[
        float | None, typer.Option(help="Largest difference allowed, instead of measured noise.")
    ] = None,
    mean_abs: Annotated[float | None, typer.Option(help="The same for the mean.")] = None,
    stream: Annotated[
        bool, typer.Option("--stream", help="Hold one layer of each side at a time.")
    ] = False,
    form: Annotated[
        str, typer.Option("--format", help="On standard output: text or json.")
    ] = "text",
    html: Annotated[Path | None, _PathOption(help="Also write a page with curves.")] = None,
    quiet: Quiet = False,
) -> None:
    """Run the same tokens through transformers and Megatron; compare trunk and every MTP depth.

    Needs the extra: pip install 'mtpconv[parity]'.
    """
    from mtpconv.cli.model import run_parity

    run_parity(
        hf, mcore, device=device, dtype=dtype, prompts=prompts, length=length, rows=rows,
        seed=seed, max_abs=max_abs, mean_abs=mean_abs, stream=stream, form=form, html=html,
        quiet=quiet,
    )  # fmt: skip


@app.command()
def args(
    model: Annotated[
        str, _Place(help="config.json, a checkpoint folder, or hf://ORG/MODEL, s3://, ...")
    ],
    form: Annotated[str, typer.Option("--format", help="flags, yaml or namespace.")] = "flags",
    mapping: Mapping = None,
) -> None:
    """Print the Megatron-LM arguments for a model, --mtp-num-layers included."""
    from mtpconv.cli.model import run_args

    run_args(model, form=form, mapping=mapping)


@app.command()
def selftest(
    hf: Annotated[
        Path | None, _Path(help="Your checkpoint (default: a built-in small one).")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Put every kind of fault into a copy and show that the audit turns red each time."""
    from mtpconv.cli.selftest import run

    run(hf, quiet=quiet)


@app.command()
def acceptance(
    checkpoint: Annotated[Path, _Path(help="HuggingFace or torch_dist folder.")],
    prompts: Annotated[
        Path | None, _PathOption(help="Text file, a prompt per line; else seeded random tokens.")
    ] = None,
    depth: Annotated[
        int | None, typer.Option(min=1, help="Drafts per pass; default: the number of MTP depths.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Random prompts, without --prompts.")] = 4,
    tokens: Annotated[int, typer.Option(min=2, help="New tokens per prompt.")] = 48,
    draft: Annotated[
        str, _PlaceOption(help="Who drafts: mtp, ngram, or the folder of a smaller model.")
    ] = "mtp",
    temperature: Annotated[float, typer.Option(help="0 is greedy; else rejection sampling.")] = 0.0,
    min_acceptance: Annotated[
        float | None, typer.Option(help="Exit 1 below this share of kept first drafts.")
    ] = None,
    against: Annotated[
        Path | None, _PathOption(help="Exit 1 if acceptance fell by more than --margin.")
    ] = None,
    margin: Annotated[float, typer.Option(help="For --against.")] = 0.02,
    draft_cost: Annotated[
        float | None, typer.Option(help="Cost of one draft per pass, instead of measuring it.")
    ] = None,
    no_cost: Annotated[
        bool, typer.Option("--no-cost", help="Do not measure what a pass costs here.")
    ] = False,
    like: Annotated[
        Path | None, _PathOption(help="Config and tokenizer for a torch_dist folder without them.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16.")] = None,
    seed: Annotated[int, typer.Option(help="Of random prompts and of sampling.")] = 0,
    form: Annotated[
        str, typer.Option("--format", help="On standard output: text or json.")
    ] = "text",
    quiet: Quiet = False,
) -> None:
    """Draft with the checkpoint's own MTP, verify with its trunk, count what was kept.

    Needs the extra: pip install 'mtpconv[parity]'.
    """
    from mtpconv.cli.model import run_acceptance

    run_acceptance(
        checkpoint, form=form, quiet=quiet, prompts=prompts, depth=depth, rows=rows, tokens=tokens,
        draft=draft, temperature=temperature, min_acceptance=min_acceptance, against=against,
        margin=margin, draft_cost=draft_cost, cost=not no_cost, like=like, device=device,
        dtype=dtype, seed=seed,
    )  # fmt: skip
