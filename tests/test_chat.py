"""Export folders are opened or refused; a conversation is what the merged model with its correction says."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from handmade_exports import (
    DOMAINS,
    adapter_export,
    attached,
    hf_export,
    manifest,
    merged,
    plain_export,
    reference,
)
from tiny import tiny_tokenizer
from typer.testing import CliRunner

from suture.chat import Conversation, interruptible
from suture.cli import app
from suture.errors import ModelError, PromptError
from suture.exported import Opened, open_export, open_model
from suture.sampling import Settings

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapter_export(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plain_export(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def opened(adapters: Path) -> Opened:
    return open_model(open_export(adapters), torch.float32, CPU)


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return open_model(open_export(hf_export(tmp_path_factory.mktemp("coded"))), torch.float32, CPU)


def talk(opened: Opened, domain: str | None = "math", **more: Any) -> tuple[Conversation, list[str]]:
    said: list[str] = []
    settings = Settings(max_new_tokens=more.pop("tokens", 10), **more.pop("settings", {}))
    return Conversation(opened, domain, settings=settings, say=said.append, **more), said


def run(folder: Path, lines: str, *arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["chat", str(folder), "--max-new-tokens", "10", *arguments], input=lines)
    assert result.exit_code == code, result.output
    return result


# Folders


def test_a_manifest_is_read(adapters):
    export = open_export(adapters)
    assert (export.kind, export.name, export.domains, export.default) == ("adapter", "tiny", DOMAINS, None)
    assert export.words == ["code", "math", "none"]
    assert (export.parse("math"), export.parse("none")) == ("math", None)


def test_unknown_domains_are_told_with_the_nearest(adapters, plain):
    with pytest.raises(ModelError, match="unknown domain 'maths'; did you mean 'math'"):
        open_export(adapters).parse("maths")
    with pytest.raises(ModelError, match=r"has no router: name a domain \(code, math\)"):
        open_export(adapters).parse("auto")
    with pytest.raises(ModelError, match="a plain export holds the corrected model only"):
        open_export(plain).parse("none")


def test_what_is_no_export_is_refused_with_advice(tmp_path, plain):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text("{}")
    for name, message in (
        ("gone", "no such folder"),
        ("", "is not an export, it has no suture.json: make one with `suture export"),
        ("checkpoint", "a checkpoint without corrections; transformers and vLLM load it as it is"),
    ):
        with pytest.raises(ModelError, match=message):
            open_export(tmp_path / name)
    (tmp_path / "x.failed").mkdir()
    (tmp_path / "x.failed" / "failed.json").write_text("{}")
    with pytest.raises(ModelError, match="failed its verification"):
        open_export(tmp_path / "x.failed")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "format 2, this suture reads 1"),
        ({"to": "pliain"}, "unknown kind 'pliain'; did you mean 'plain'"),
        ({"domains": []}, "domains: should be a list of names"),
        ({"default": "maths"}, "unknown domain 'maths'"),
        ({"default": "auto"}, "has no router"),
    ],
)
def test_broken_manifests_are_told(tmp_path, changes, message):
    manifest(tmp_path, "adapter")
    manifest(tmp_path, **{"kind": "adapter", **changes})
    with pytest.raises(ModelError, match=message):
        open_export(tmp_path)


def test_gguf_and_missing_adapters_are_refused(tmp_path):
    manifest(tmp_path, "gguf")
    with pytest.raises(ModelError, match="which llama"):
        open_model(open_export(tmp_path), torch.float32, CPU)
    merged().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    manifest(tmp_path, "adapter")
    with pytest.raises(ModelError, match="lacks adapters/code"):
        open_model(open_export(tmp_path), torch.float32, CPU)


# Answers


@pytest.mark.parametrize("domain", [None, *DOMAINS])
def test_an_answer_is_what_the_corrected_model_says(opened, domain):
    conversation, _ = talk(opened, domain)
    pieces: list[str] = []
    turn = conversation.answer("why?", pieces.append)
    assert turn.answer == reference("why?", domain, 10)
    assert "".join(pieces) == turn.answer
    assert list(turn.answer) == pieces  # a token a letter here


def test_the_domains_differ():
    assert len({reference("why?", domain, 10) for domain in (None, *DOMAINS)}) == 3


def test_domains_with_dots_and_many_threads_do_not_mix(tmp_path):
    folder = adapter_export(tmp_path)
    (folder / "adapters" / "math").rename(folder / "adapters" / "v1.math")
    manifest(folder, "adapter", domains=["code", "v1.math"])
    opened = open_model(open_export(folder), torch.float32, CPU)
    expected = {None: None, "code": "code", "v1.math": "math"}
    wrong: list[Any] = []

    def ask(domain: str | None) -> None:
        ids = torch.tensor([opened.tokenizer("<s>user: why? A:", add_special_tokens=False).input_ids])
        for _ in range(4):
            out = opened.generate(
                ids, domain=domain, attention_mask=torch.ones_like(ids), max_new_tokens=8, pad_token_id=0
            )
            text = opened.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
            if text != reference("why?", expected[domain], 8):
                wrong.append((domain, text))

    threads = [threading.Thread(target=ask, args=(domain,)) for domain in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_plain_export_speaks_and_has_nothing_to_compare(plain):
    opened = open_model(open_export(plain), torch.float32, CPU)
    conversation, said = talk(opened, "math")
    assert conversation.answer("why?").answer == reference("why?", "math", 10)
    assert said == []
    with pytest.raises(ModelError, match="nothing to compare with"):
        conversation.compare()


@pytest.mark.parametrize("domain", [None, *DOMAINS])
def test_an_export_with_code_says_what_the_attached_model_says(coded, domain):
    conversation, _ = talk(coded, domain)
    assert conversation.answer("why?").answer == attached("why?", domain, 10)


@pytest.mark.parametrize("domain", [None, *DOMAINS])
def test_the_router_chooses(tmp_path, domain):
    from suture.router import Router

    router = Router(32, 2)
    if domain is not None:  # every state is near this one's centre, and far from the other's
        router.centres[1 - DOMAINS.index(domain)] = 1e3
        router.limits.fill_(1e6)
    export = open_export(hf_export(tmp_path, router=router, default="auto"))
    assert export.words == ["code", "math", "auto", "none"]
    conversation, _ = talk(open_model(export, torch.float32, CPU), "auto")
    assert conversation.answer("why?").answer == attached("why?", domain, 10)


def test_code_that_was_changed_runs_only_where_it_is_trusted(tmp_path):
    folder = hf_export(tmp_path / "changed")
    with (folder / "modeling_suture.py").open("a") as file:
        file.write(f"\nopen({str(tmp_path / 'ran')!r}, 'w').close()\n")
    with pytest.raises(ModelError, match="not what this version of suture writes"):
        open_model(open_export(folder), torch.float32, CPU)
    assert not (tmp_path / "ran").exists()
    open_model(open_export(folder), torch.float32, CPU, trust_remote_code=True)
    assert (tmp_path / "ran").exists()


def test_the_history_and_the_system_message_are_in_the_prompt(opened):
    conversation, _ = talk(opened, system="be kind")
    first = conversation.answer("one").answer
    prompt = conversation.opened.tokenizer.decode(conversation._ids("two"))
    assert prompt == f"<s>system: be kind user: one assistant: {first} user: two A:"
    conversation.command("/system none")
    conversation.command("/reset")
    assert conversation.opened.tokenizer.decode(conversation._ids("two")) == "<s>user: two A:"


def test_without_a_chat_template_it_goes_on_from_the_text(tmp_path):
    opened = open_model(open_export(adapter_export(tmp_path, chat=False)), torch.float32, CPU)
    conversation, said = talk(opened, "code")
    assert "no chat template" in said[0]
    assert conversation.answer("12").answer == reference("12", "code", 10, chat=False)
    shown = opened.tokenizer.decode(conversation._ids("34"), skip_special_tokens=True)
    assert shown == f"12{conversation.turns[0].answer}34"  # the tiny tokenizer has no line break


def test_a_long_conversation_forgets_its_oldest_turns(opened):
    conversation, said = talk(opened, tokens=20)
    for _ in range(5):
        conversation.answer("x" * 30)
    assert len(conversation.turns) < 5
    assert "the model has 128 positions: forgot the oldest" in said[-1]
    with pytest.raises(PromptError, match="the message takes 210 tokens, the model has 128 positions"):
        conversation.answer("x" * 200)


def test_it_stops_at_every_end_token(adapters, tmp_path):
    text = reference("why?", "math", 10)
    opened = open_model(open_export(adapters), torch.float32, CPU)
    third = opened.tokenizer(text, add_special_tokens=False).input_ids[2]
    opened.model.generation_config.eos_token_id = [2, third]
    conversation, _ = talk(opened)
    assert conversation.answer("why?").answer == text[:3]


def test_a_template_that_refuses_is_told(adapters):
    opened = open_model(open_export(adapters), torch.float32, CPU)
    opened.tokenizer.chat_template = "{{ raise_exception('no system here') }}"
    conversation, _ = talk(opened)
    with pytest.raises(PromptError, match="refuses these messages: no system here"):
        conversation.answer("why?")
    assert conversation.turns == []


def test_sampling_depends_on_the_seed_alone(opened):
    def said(seed: int) -> str:
        return talk(opened, settings={"temperature": 2.0, "seed": seed})[0].answer("why?").answer

    assert said(1) == said(1) != said(2)


def test_ctrl_c_stops_the_answer_and_a_second_one_the_program():
    with interruptible() as stop:
        assert stop(torch.zeros(1, 3)).tolist() == [False]
        os.kill(os.getpid(), signal.SIGINT)
        assert stop(torch.zeros(2, 3)).tolist() == [True, True]
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_stopped_answer_is_kept_as_far_as_it_came(opened):
    conversation, _ = talk(opened, tokens=60)
    pieces: list[str] = []

    def press_at_the_third(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    turn = conversation.answer("why?", press_at_the_third)
    assert 3 <= turn.tokens <= 4
    assert reference("why?", "math", 60).startswith(turn.answer)
    assert conversation.turns == [turn]


# Comparing


def test_the_last_answer_is_compared_with_the_uncorrected_one(opened):
    conversation, _ = talk(opened, "math")
    with pytest.raises(PromptError, match="nothing to compare yet"):
        conversation.compare()
    turn = conversation.answer("why?")
    assert [each.answer for each in conversation.compare()] == [turn.answer, reference("why?", None, 10)]
    assert conversation.turns == [turn]
    # an uncorrected answer is compared with the domain of now
    conversation.command("/reset")
    conversation.command("/domain none")
    conversation.answer("why?")
    with pytest.raises(ModelError, match=r"choose a domain first: /domain code \| math \| none"):
        conversation.compare()
    conversation.command("/domain code")
    assert [each.answer for each in conversation.compare()] == [reference("why?", each, 10) for each in ("code", None)]


# The command


def test_piped_lines_are_messages_and_commands(adapters):
    result = run(adapters, "why?\n\n/domain math\nwhy?\n/reset\n//x\n/quit\nwhy?\n", "-d", "code")
    answers = result.stdout.splitlines()
    assert answers[0] == reference("why?", "code", 10)
    assert len(answers) == 3
    assert answers[2] == reference("/x", "math", 10)
    assert result.stderr.splitlines() == ["domain: math", "forgotten"]


def test_json_is_a_line_an_answer(adapters):
    lines = run(adapters, "/compare\nwhy?\n", "-d", "math", "--json").stdout.splitlines()
    (pair,) = map(json.loads, lines)
    shared = {"prompt": "why?", "tokens": 10}
    assert pair == {
        "corrected": {"domain": "math", "text": reference("why?", "math", 10), **shared},
        "uncorrected": {"domain": None, "text": reference("why?", None, 10), **shared},
    }


def test_two_columns(adapters):
    table = run(adapters, "why?\n/compare\n", "-d", "math").stdout.splitlines()
    assert any(line.split()[1:4:2] == ["math", "uncorrected"] for line in table)
    row = next(line for line in table[1:] if reference("why?", None, 10)[:5] in line)
    assert reference("why?", "math", 10)[:5] in row


def test_the_start_is_the_default_the_only_domain_or_none(tmp_path, adapters, plain):
    assert "uncorrected; choose with /domain code | math | none" in run(adapters, "/quit\n").stderr
    assert run(plain, "why?\n").stdout == reference("why?", "math", 10) + "\n"
    folder = adapter_export(tmp_path, default="code")
    assert run(folder, "why?\n/domain\n").stdout == reference("why?", "code", 10) + "\n"


def test_errors_end_a_script(adapters):
    result = run(adapters, "/domian math\nwhy?\n", code=1)
    assert "error: unknown command '/domian'; did you mean '/domain'?" in result.stderr
    assert result.stdout == ""
    assert "unknown domain 'maths'" in run(adapters, "", "-d", "maths", code=1).stderr
    assert "--dtype: unknown 'float8'" in run(adapters, "", "--dtype", "float8", code=1).stderr
    assert "no such folder: gone" in CliRunner().invoke(app, ["chat", "gone"]).stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_has_a_prompt_and_ctrl_d_leaves(adapters):
    import pty

    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "suture.cli", "chat", str(adapters), "-d", "math", "--max-new-tokens", "10"]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as child:
        os.close(theirs)

        def until(mark: str, press: bool = False) -> str:
            shown, end = "", time.monotonic() + 60
            while mark not in shown:
                assert time.monotonic() < end, shown
                if press and not shown:  # again: one that comes just before the terminal is read waits for a key
                    child.send_signal(signal.SIGINT)
                if select.select([ours], [], [], 3)[0]:
                    shown += os.read(ours, 4096).decode(errors="replace")
            return shown

        try:
            assert "tiny: domains code, math, none; /help lists the commands" in until("math> ")
            os.write(ours, b"why?\n")
            assert reference("why?", "math", 10) in until("math> ")
            os.write(ours, b"/domain cod\n")
            assert "did you mean 'code'?" in until("math> ")  # and goes on
            os.write(ours, b"/domain code\n")
            until("code> ")
            said = until("/quit or Ctrl-D leaves", press=True)
            if "code> " not in said.split("leaves")[-1]:  # a key that comes before the prompt is lost
                until("code> ")
            os.write(ours, b"\x04")
            assert child.wait(timeout=20) == 0
        finally:
            child.kill()
            os.close(ours)


def test_help_names_every_command(adapters):
    from suture.chat import COMMANDS

    told = run(adapters, "/help\n", "-d", "math").stderr
    assert all(name in told for name in COMMANDS)
