"""Words of the command line that name a file, a folder or what lies at a URL.

Every command takes them through here: what a word cannot mean is refused before anything is read
or written. Light, as each start imports it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mtpconv.errors import UsageError

#: A word that begins with one of these and a colon is meant as a URL.
_SCHEMES = frozenset({
    "http", "https", "hf", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss",
    "hdfs", "webhdfs", "ftp", "sftp", "ssh", "memory", "file", "local",
})  # fmt: skip
#: Schemes with a host and a port before the first slash: nothing else there has a colon.
_HOSTS = frozenset({"http", "https", "ftp", "sftp", "ssh", "hdfs", "webhdfs"})
#: At the beginning, and behind `::` in fsspec's chains; one letter is a drive.
_SCHEME = re.compile(r"(?:^|(?<=::))[A-Za-z][A-Za-z0-9+.-]+(?=://)")
_AUTHORITY = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)")
_PORT = re.compile(r"(?:\[[^\]]*\]|[^:]*)(?::[0-9]*)?")


def place(text: str) -> str:
    """A word that names a file, a folder or what lies at a URL; `file://` as the path it is.

    Raises: UsageError if it is empty, which Python would take for the current folder; for a URL
    with a password, or with a query; for what looks like a URL, is none and does not exist.
    """
    if not text:
        raise UsageError("an empty name is no file or folder; is a variable of the shell unset?")
    text = _SCHEME.sub(lambda found: found[0].lower(), text)
    _require_no_password(text)
    _require_no_query(text)
    _require_no_typo(text)
    if not text.startswith("file://"):
        return text
    from mtpconv.store.places import local_path

    return str(local_path(text))


def path(text: str) -> Path:
    """A word that names a file or folder of this machine.

    Raises: UsageError for a URL: as a path, `s3://a/b` is `b` in a folder `s3:` of the current
    one; and as `place`.
    """
    text = place(text)
    if "://" in text:
        raise UsageError(f"{text}: is a URL, and only a file or folder of this machine goes here")
    return Path(text)


def target(text: str) -> str:
    """A word that names a folder or URL to write.

    Raises: UsageError for `memory://`, which nobody can read when the command has ended; and as
    `place`.
    """
    text = place(text)
    if text.rpartition("::")[2].startswith("memory://"):
        raise UsageError(
            f"{text}: is memory of this command and gone when it ends; name a folder, s3://, "
            "gs:// or hf://"
        )
    return text


def report_file(text: str) -> str:
    """FORMAT=FILE. Raises: UsageError as `path`, for the file."""
    form, found, file = text.partition("=")
    return f"{form}={path(file)}" if found and file else text


def _require_no_password(text: str) -> None:
    """Refuse a URL with a user and a password: messages and notes name it, logs keep them.

    Elsewhere what stands before `@` may be a container (`abfs://`) or a name (`ssh://`).
    """
    for found in _AUTHORITY.finditer(text):
        scheme, authority = found[1].lower(), found[2]
        user, at, _ = authority.rpartition("@")
        # A password with a slash in it ends the host early, behind what looks like a port.
        broken = scheme in _HOSTS and not _PORT.fullmatch(authority) and "@" in text[found.end() :]
        if broken or (at and (":" in user or scheme in ("http", "https"))):
            host = re.split("[/?#]", text.rpartition("@")[2])[0]
            raise UsageError(
                f"{scheme}://...@{host}: a URL must not hold a user name or password, which would "
                "be shown in messages; put them into the configuration or environment of the store"
            )


def _require_no_query(text: str) -> None:
    """Refuse a query: files are asked for below a URL. It may be a signature, so not shown."""
    if text.startswith(("http://", "https://")):
        bare = re.split("[?#]", text, maxsplit=1)[0]
        if bare != text:
            raise UsageError(
                f"{bare}: is followed by {text[len(bare)]}, and files are asked for below a URL, "
                "which has no query or fragment; name the folder's URL without, or download it"
            )


def _require_no_typo(text: str) -> None:
    """Refuse what would silently be a local path, such as `s3:/a/b`."""
    scheme, found, rest = text.partition(":")
    if not found or scheme.lower() not in _SCHEMES or os.path.lexists(text):
        return
    if not rest.startswith("//") or not rest.strip("/"):
        shown = f"{scheme}:..." if "@" in text or "?" in text else text  # it may hold a password
        raise UsageError(
            f"{shown}: is no URL, and no such file or folder exists; write {scheme.lower()}://..., "
            f"or ./{scheme}:... for a name on this machine"
        )
