"""A conversation with the real embedded model."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeft.errors import DataError, ModelError
from edgeft.evaluate.chat import Chat
from edgeft.evaluate.llamacpp import Sampling
from edgeft.formats.source import demo_model

MODEL = demo_model()
pytestmark = pytest.mark.skipif(MODEL is None, reason="the embedded model is not installed")


def chat(**settings: object) -> Chat:
    assert MODEL
    return Chat(MODEL, threads=1, **settings)  # type: ignore[arg-type]


def test_a_second_turn_knows_the_first_and_computes_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    with chat(sampling=Sampling(8), system="You answer shortly.") as talk:
        pieces = list(talk.ask("Say hello."))
        assert len(pieces) > 1
        assert talk.messages == [
            {"role": "user", "content": "Say hello."},
            {"role": "assistant", "content": "".join(pieces).strip()},
        ]
        decoded: list[int] = []
        real = talk.file.decode

        def counting(steps):  # type: ignore[no-untyped-def]
            decoded.append(len(steps))
            return real(steps)

        monkeypatch.setattr(talk.file, "decode", counting)
        second = "".join(talk.ask("And now goodbye."))
        whole = talk._fit()
        assert 0 < decoded[0] < len(whole) // 2  # the first turn was not read again
    with chat(sampling=Sampling(8), system="You answer shortly.") as again:
        again.messages = talk.messages[:2]
        assert "".join(again.ask("And now goodbye.")) == second


def test_old_turns_make_room_and_the_person_is_told() -> None:
    with chat(sampling=Sampling(4), n_ctx=128) as talk:
        for i in range(4):
            "".join(talk.ask(f"Question {i}: " + "why " * 20))
        assert any("oldest" in notice for notice in talk.notices)
        assert talk.messages[0]["role"] == "user"
        assert "Question 3" in talk.messages[-2]["content"]
        before = list(talk.messages)
        with pytest.raises(DataError, match="the context holds 128"):
            list(talk.ask("why " * 300))
        list(talk.ask("Short?"))  # the conversation goes on
        assert talk.messages[-2]["content"] == "Short?"
        assert before


def test_an_answer_cut_off_says_so_and_an_ended_one_does_not() -> None:
    with chat(sampling=Sampling(2)) as talk:
        list(talk.ask("Tell me a long story."))
        assert any("cut off" in notice for notice in talk.notices)
    with chat(sampling=Sampling(60)) as talk:
        list(talk.ask("Say only: yes"))
        assert talk.notices == []


def test_what_came_before_an_interruption_is_kept() -> None:
    with chat(sampling=Sampling(20)) as talk:
        answer = iter(talk.ask("Tell me a story."))
        first = next(answer)
        answer.close()  # type: ignore[attr-defined]
        assert talk.messages[-1] == {"role": "assistant", "content": first.strip()}


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        Chat(tmp_path / "none.gguf")
