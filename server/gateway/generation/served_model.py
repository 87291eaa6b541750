"""The served model as requests meet it: names, limits, defaults, and the ways to and from text.

Owns the one bundle that all dialects are given. Knows no request; server.gateway.service fills it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from models.text.chat_template import ChatTemplate
from models.text.tokenizer import Tokenizer
from server.gateway.bodies.fields import BodyReader
from server.gateway.bodies.sampling_defaults import SamplingDefaults
from server.gateway.errors import ModelNotFound, truncated
from server.gateway.parsing.formats import MessageFormats
from server.sampling_limits import MAX_LOGPROBS
from topspin.errors import InvalidRequest
from topspin.plan.retrieval import RetrievalPolicy


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """The names of the served model, and the facts against which requests are checked.

    `root` is the checkpoint's directory. `template` None: the checkpoint has no chat template, and
    chat is refused. `formats` is what can be read in the model's text. `retrieval`: what tokens of
    long contexts attend to; None: to all keys. `ignores_unknown`: requests may have fields that no
    API here has. `max_logprobs`: so many candidates beside each token may be asked for.
    """

    names: tuple[str, ...]
    root: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    created_at_s: int
    defaults: SamplingDefaults
    tokenizer: Tokenizer
    template: ChatTemplate | None
    formats: MessageFormats
    retrieval: RetrievalPolicy | None = None
    ignores_unknown: bool = False
    max_logprobs: int = MAX_LOGPROBS

    def reader(self) -> BodyReader:
        """Return what reads a request's body as the operator wants."""
        return BodyReader(keeps_on=self.ignores_unknown)

    def checked_name(self, asked: str | None) -> str:
        """Return the name by which a request asks for the model, the first one if by none.

        Raises ModelNotFound for other names.
        """
        if asked is not None and asked not in self.names:
            raise ModelNotFound(
                f"the model `{truncated(asked, 64)}` is not served here", param="model"
            )
        return asked or self.names[0]

    def check_vocabulary(self, token_ids: Sequence[int], *, param: str) -> None:
        """Raise InvalidRequest if an id is outside the vocabulary."""
        if token_ids and max(token_ids) >= self.vocab_size:
            raise InvalidRequest(
                f"`{param}`: token id {max(token_ids)} is outside the vocabulary of "
                f"{self.vocab_size}",
                param=param,
            )

    def chat_template(self, otherwise: str) -> ChatTemplate:
        """Return the chat template; raises InvalidRequest that says what to do `otherwise`."""
        if self.template is None:
            raise InvalidRequest(f"the model has no chat template; {otherwise}", param="messages")
        return self.template
