"""Takes the answers of finished requests apart: their thoughts, content and tool calls.

Nothing of the request is needed but its tokens and its tools, so an output of any form of prompt can be read.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from ..checks import is_integer, refusal, told
from ..outputs import RequestOutput
from .answers.answer_spec import spec_of_tools
from .answers.bound_format import BoundFormat
from .answers.whole_answer import Answer, parse_answer
from .chat.thinking import BEGIN, opening_of
from .chat.tools import ToolSet
from .tokenizing.detokenizer import Detokenizer
from .tokenizing.tokenizer import Tokenizer


@dataclass(frozen=True)
class OutputParser:
    """Reads the outputs of one model."""

    tokenizer: Tokenizer
    format: BoundFormat
    template: str
    """The chat template in use."""

    def answer(
        self, output: RequestOutput, index: int = 0, *, tools: ToolSet | None = None, skip_special_tokens: bool = True
    ) -> Answer:
        """Return the answer in the `index`th sample of an output that holds all of it.

        Of a call, a name must be one of `tools`; None: any name. `skip_special_tokens` is the request's. Raise
        InvalidRequestError if `output` is none, or there is no such sample.
        """
        if not isinstance(output, RequestOutput):
            raise refusal("output", told(output), "one RequestOutput; chat returns a list of them")
        if not is_integer(index) or not 0 <= index < len(output.outputs):
            raise refusal("index", told(index), f"0 to {len(output.outputs) - 1}, the samples of the output")
        sample = output.outputs[index]
        prompt = self.tokenizer.decode(list(output.prompt_token_ids), skip_special_tokens=False)
        begin = BEGIN if self.format.format.thought is None else self.format.thought_marks[0]
        opening = opening_of(self.tokenizer, self.template, prompt, begin)
        spec = spec_of_tools(tools, opening=opening, skip_special_tokens=skip_special_tokens)
        if tools is None:
            spec = msgspec.structs.replace(spec, tools=None)
        text = Detokenizer(
            self.tokenizer,
            output.prompt_token_ids,
            skip_special_tokens=skip_special_tokens,
            mark_ids=self.format.mark_ids,
        )
        text.append(sample.token_ids)
        return parse_answer(sample.text, self.format, spec, text.marks(0, len(sample.text)))
