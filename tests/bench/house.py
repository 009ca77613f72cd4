"""How large the package is, and how its folders depend on each other: `python -m tests.bench.house [REVISION]`.

Counts what STYLE guides measure: files, lines, code lines, classes, branches per 100 lines of functions, comments on
lines of their own. `--drawing` prints the imports between folders as a Mermaid graph, as ARCHITECTURE.md shows it.
Generated code is left out. A revision is read from git; without one it is the working tree.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BRANCHES = (ast.If, ast.For, ast.While, ast.Try, ast.ExceptHandler, ast.With, ast.IfExp, ast.comprehension, ast.BoolOp,
            ast.match_case)  # fmt: skip


def sources(revision: str | None) -> Iterator[tuple[str, str]]:
    """Path below the package, and text, of each module."""
    if revision is None:
        names = [path.relative_to(ROOT).as_posix() for path in (ROOT / "elasticrt").rglob("*.py")]
    else:
        names = _git("ls-tree", "-r", "--name-only", revision, "elasticrt").split()
    for name in sorted(names):
        if name.endswith(".py") and "/proto/" not in name:
            text = (ROOT / name).read_text() if revision is None else _git("show", f"{revision}:{name}")
            yield name.removeprefix("elasticrt/"), text


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def counted(revision: str | None) -> dict[str, float]:
    """The figures of one revision."""
    files = lines = code = comments = classes = branches = function_lines = 0
    for _, text in sources(revision):
        files += 1
        lines += len(text.splitlines())
        tree = ast.parse(text)
        prose = _prose(tree)
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
        own = {t.start[0] for t in tokens if t.type == tokenize.COMMENT and not t.line[: t.start[1]].strip()}
        said = {line for t in tokens if t.type not in _SILENT for line in range(t.start[0], t.end[0] + 1)}
        comments += len(own)
        code += len(said - prose)
        classes += sum(isinstance(node, ast.ClassDef) for node in ast.walk(tree))
        for node in _functions(tree):
            function_lines += (node.end_lineno or node.lineno) - node.lineno + 1
            branches += sum(isinstance(each, BRANCHES) for each in ast.walk(node))
    return {
        "files": files,
        "lines": lines,
        "lines of code": code,
        "classes": classes,
        "branches per 100 lines of functions": round(100 * branches / function_lines, 1),
        "comments on lines of their own, % of code": round(100 * comments / code, 1),
    }


_SILENT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def _prose(tree: ast.AST) -> set[int]:
    """The lines of docstrings, those of constants too."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods, without those inside others."""
    for node in tree.body:
        for each in [node, *(node.body if isinstance(node, ast.ClassDef) else [])]:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                yield each


def imports(revision: str | None) -> set[tuple[str, str]]:
    """Which folder imports which, each pair once."""
    found = set()
    for name, text in sources(revision):
        mine = name.split("/")[0].removesuffix(".py")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("elasticrt."):
                theirs = (node.module or "").split(".")[1]
                if "/" in name and theirs != mine:
                    found.add((mine, theirs))
    folders = {name.split("/")[0] for name, _ in sources(revision) if "/" in name}
    return {(one, other) for one, other in found if other in folders}


def drawing(revision: str | None) -> str:
    """The imports as a Mermaid graph. An arrow that follows from two others is left out."""
    pairs = imports(revision)
    kept = sorted(pair for pair in pairs if not _goes_without(pair, pairs))
    return "\n".join(["graph TD", *(f"  {one} --> {other}" for one, other in kept)])


def _goes_without(pair: tuple[str, str], pairs: set[tuple[str, str]]) -> bool:
    reached, new = set(), {other for one, other in pairs if one == pair[0] and other != pair[1]}
    while new:
        reached |= new
        new = {other for one, other in pairs if one in new} - reached
    return pair[1] in reached


def main() -> None:
    """Print the table, or the drawing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="*", help="each a column; none: the working tree")
    parser.add_argument("--drawing", action="store_true")
    arguments = parser.parse_args()
    if arguments.drawing:
        print(drawing(arguments.revision[0] if arguments.revision else None))
        return
    columns = [counted(revision) for revision in arguments.revision or [None]]
    for what in columns[0]:
        print(f"{what:45}", *(f"{column[what]:>10,}" for column in columns))


if __name__ == "__main__":
    main()
