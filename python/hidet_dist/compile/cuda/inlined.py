"""Parts of hidet scripts: functions in hidet's language whose statements are written where they are called.

A script is one Python function, and a kernel as one is long. hidet's own functions for devices take scalars and
pointers only; a part takes what a script has: tensors in registers and in shared memory, numbers, functions of indices.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from hidet.ir.stmt import Stmt
from hidet.lang.transpiler import PythonToHidetTranslator


def script_part(function: Callable[..., None]) -> Callable[..., Stmt]:
    """Make a part of scripts from a function in hidet's language; it returns nothing, and assigns to no parameter.

    Called within a script, with arguments by position, it adds its statements there. Its variables are its own.
    """
    lines, first_line = inspect.getsourcelines(function)
    (definition,) = ast.parse(textwrap.dedent("".join(lines))).body
    assert isinstance(definition, ast.FunctionDef)
    names = [argument.arg for argument in definition.args.args]

    @functools.wraps(function)
    def statements(*arguments: Any) -> Stmt:
        environment = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
        translator = PythonToHidetTranslator(inspect.getsourcefile(function), first_line, 0, environment, {})
        with translator.scope() as scope:
            for name, value in zip(names, arguments, strict=True):
                scope.define_host_var(name, value)
            for statement in definition.body:
                translator.visit(statement)
        result: Stmt = scope.flush_stmts()
        return result

    return statements
