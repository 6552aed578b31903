"""Chat templates: prompts made of messages by the Jinja template of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hidet_dist.checks import shown
from hidet_dist.errors import ConfigError, InputError
from hidet_dist.limits import MOST_NESTED
from hidet_dist.llm.confined import Confined, ExceededError

_RENDERER = Confined("hidet_dist.llm.confined.templates")


def start_renderer() -> None:
    """Start the process that renders templates, without waiting for it. The first template starts it otherwise."""
    _RENDERER.start()


class ChatTemplate:
    """A chat template. It is rendered in a process with bounds of time and memory.

    Parameters
    ----------
    source: str
        The template. It is data from outside: it reaches nothing but the values that it is given.
    special_texts: mapping
        Texts of special tokens by name, such as ``bos_token``.

    Raises
    ------
    ConfigError
        When the template is malformed.
    ImportError
        When Jinja is not installed.
    """

    def __init__(self, source: str, special_texts: Mapping[str, str]):
        self._source = source
        self._special_texts = dict(special_texts)
        try:
            answer = _RENDERER.call({"source": source, "names": None})
        except ExceededError as error:
            raise ConfigError(f"The chat template of the model cannot be compiled: {error}.") from error
        if "missing" in answer:
            raise ImportError(f"No module named {answer['missing']!r}", name=answer["missing"])
        if "malformed" in answer:
            raise ConfigError(f"The chat template of the model is malformed: {answer['malformed']}.")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        answers: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Make the prompt of messages.

        Parameters
        ----------
        messages: sequence of mapping
            Messages with ``role`` and ``content``, oldest first; values of JSON.
        tools: sequence of mapping, optional
            Descriptions of functions that the model may call, as OpenAI's API has them.
        answers: bool
            Whether the prompt ends where the model's answer begins.
        options: mapping, optional
            Other names that the template knows, such as ``enable_thinking``.

        Raises
        ------
        InputError
            When the template refuses the messages, fails for them, or makes a prompt that is too long.
        """
        names = {
            **self._special_texts,
            **_plain(options or {}),
            "messages": _plain(messages),
            "tools": _plain(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": answers,
        }
        try:
            answer: dict[str, str] = _RENDERER.call({"source": self._source, "names": names})
        except ExceededError as error:
            raise InputError(f"The chat template of the model takes too much for these messages: {error}.") from error
        if "wrong" in answer:
            raise InputError(f"The chat template of the model does not take these messages: {answer['wrong']}")
        return answer["text"]


def _plain(value: Any, depth: int = 0) -> Any:
    """Copy values of JSON, so that a template reaches no object of this process. Raises InputError for others."""
    if depth > MOST_NESTED:
        raise InputError(f"Messages and tools may have at most {MOST_NESTED} lists and objects in one another.")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(part, depth + 1) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part, depth + 1) for part in value]
    raise InputError(f"Messages and tools must be values of JSON; got {shown(value)}.")
