"""The OpenAI wire against the scripted server: what comes out, what is tried again, which clock ends what."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peri_tui.agent.models.call import (
    Clocks,
    Finished,
    ModelEvent,
    Retrying,
    TextDelta,
    ThinkingDelta,
    ToolCall,
    UsageReport,
)
from peri_tui.agent.models.registry import open_model as open_choice
from peri_tui.core.messages import ModelChoice, Usage
from peri_tui.errors import (
    ConfigError,
    ModelAuthFailed,
    ModelBusy,
    ModelError,
    ModelProtocolError,
    ModelRefused,
    ModelTimeout,
    ModelTruncated,
    ModelUnreachable,
    UsageError,
)
from peri_tui.net import ModelTransport
from tests.doubles.model_calls import collect, open_model, open_to, request, until
from tests.doubles.model_server import ModelServer

pytestmark = pytest.mark.contract

KEY = "sk-very-secret-0123456789"
NOW: dict[str, Any] = {"delays": lambda: iter([0.0] * 9)}


def text_of(events: list[ModelEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


async def ask(
    server: ModelServer, prompt: str = "hello", **options: Any
) -> tuple[list[ModelEvent], Exception | None]:
    """Return (what was yielded, how it ended) of one turn with a model of its own."""
    model, got = open_model(server.base_url, **options), []
    try:
        await collect(model, request(prompt), got)
    except ModelError as error:
        return got, error
    finally:
        await model.aclose()
        assert open_to(server.port) == []
    return got, None


def replies(**by_prompt: list[dict[str, Any]] | list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return a script with one or more replies a prompt."""
    found = []
    for prompt, steps in by_prompt.items():
        sequence = steps if steps and isinstance(steps[0], list) else [steps]
        found += [{"when": prompt, "steps": reply} for reply in sequence]
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    script = replies(
        whole=[
            {"thinking": "hm"}, {"text": "hällo 🙂 wörld\u2028!"},
            {"tools": [
                {"tool": "shell", "args": {"command": "ls"}, "split": 1},
                {"tool": "read_file", "args": {"path": "ä"}, "split": 3},
                {"tool": "search", "args": {"pattern": "x"}, "split": 2},
            ]},
            {"usage": {"prompt_tokens": 7, "completion_tokens": 9}},
        ],
        bytewise=[{"bytes": 1}, {"text": "hällo 🙂\u2028"}, {"tool": "shell", "args": {"command": "é"}, "split": 4}],
        eof_cut=[{"text": "half"}, {"tool": "shell", "args": {"a": 1}, "cut_at": 5}, {"done": False}],
        eof_call=[{"tool": "shell", "args": {"a": 1}}, {"done": False}],
        fin=[{"text": "half"}, {"cut": "fin"}],
        rst=[{"text": "half"}, {"stall": 0.05}, {"cut": "rst"}],
        after_finish=[{"text": "all"}, {"finish": "stop"}, {"cut": "fin"}],
        hangs_after_finish=[{"text": "all"}, {"finish": "stop"}, {"done": False}, {"stall": -1}],
        at_length=[{"tool": "shell", "args": {"a": "/tmp"}, "cut_at": 7}, {"finish": "length"}],
        invalid=[{"text": "a"}, {"invalid": True}],
        no_json=[{"raw": "data: what?\n\n"}],
        endless_line=[{"raw": "data: " + "x" * 9_000_000}],
        error_first=[[{"error": {"message": "Overloaded", "type": "overloaded_error"}}], [{"text": "fine"}]],
        error_later=[{"text": "a"}, {"error": {"message": "Overloaded", "type": "overloaded_error"}}],
        limit_once=[[{"status": 429, "retry_after": 0}], [{"text": "fine"}]],
        unavailable=[{"status": 503, "body": {"error": {"message": "try later"}}}],
        much_later=[{"status": 429, "retry_after": 3600}],
        bad_request=[{"status": 400, "body": {"error": {"message": f"bad {KEY} thing"}}}],
        wrong_key=[{"status": 401, "body": {"error": {"message": f"Incorrect API key provided: {KEY}"}}}],
        forbidden=[{"status": 403, "body": "no\nentry", "content_type": "text/plain"}],
        page=[{"status": 200, "body": "<html><body>Welcome</body></html>", "content_type": "text/html"}],
        page_404=[{"status": 404, "body": "<html>Not Found</html>", "content_type": "text/html"}],
        unstreamed_error=[{"status": 200, "body": {"error": {"message": "no such model"}}}],
        unstreamed=[{"status": 200, "body": {"choices": []}}],
        dropped=[[{"headers_delay": 0.01}, {"stall": 0}, {"cut": "rst"}], [{"text": "fine"}]],
        black_hole=[{"text": "abcdefghijklmnopqrst"}, {"stall": -1}],
        no_headers=[{"headers_delay": -1}],
        no_body=[{"stall": -1}],
        keep_alives=[{"text": "a"}, {"comment": "ping", "every": 0.1, "count": 8}, {"text": "b"}],
        trickle=[{"comment": "ping", "every": 0.05, "count": 1000}],
    )  # fmt: skip
    with ModelServer([*script, [{"text": "ok"}]]) as running:
        yield running


async def test_a_whole_turn(server: ModelServer) -> None:
    model = open_model(server.base_url)
    got = await collect(model, request("whole", max_tokens=99), [])
    assert got[0] == ThinkingDelta("hm")
    assert text_of(got) == "hällo 🙂 wörld\u2028!"
    assert [(c.index, c.name, c.arguments) for c in got if isinstance(c, ToolCall)] == [
        (0, "shell", '{"command": "ls"}'),
        (1, "read_file", '{"path": "\\u00e4"}'),
        (2, "search", '{"pattern": "x"}'),
    ]
    assert got[-2:] == [UsageReport(7, 9), Finished("tool_calls")]
    assert model.usage() == Usage(tokens_in=7, tokens_out=9)
    assert model.far_end() == "none"
    assert model.phase == "idle"
    sent = server.requests()[-1]["options"]
    assert sent == {
        "model": "scripted",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 99,
    }
    await model.aclose()


async def test_every_byte_its_own_chunk(server: ModelServer) -> None:
    got, error = await ask(server, "bytewise")
    assert error is None
    assert text_of(got) == "hällo 🙂\u2028"
    assert [c.arguments for c in got if isinstance(c, ToolCall)] == ['{"command": "\\u00e9"}']


async def test_turns_share_a_connection_and_add_up(server: ModelServer) -> None:
    accepted = len(server.events("accept"))
    model = open_model(server.base_url)
    for _ in range(3):
        await collect(model, request("whole"), [])
    assert len(server.events("accept")) == accepted + 1
    assert model.usage() == Usage(tokens_in=21, tokens_out=27)
    await model.aclose()


@pytest.mark.parametrize("prompt", ["eof_cut", "eof_call", "fin", "rst"])
async def test_an_end_without_terminator_is_truncated_and_calls_nothing(
    server: ModelServer, prompt: str
) -> None:
    got, error = await ask(server, prompt, **NOW)
    assert isinstance(error, ModelTruncated)
    assert [event for event in got if isinstance(event, (ToolCall, Finished, Retrying))] == []
    assert text_of(got) == ("" if prompt == "eof_call" else "half")


@pytest.mark.parametrize("prompt", ["after_finish", "hangs_after_finish"])
async def test_after_the_finish_reason_the_end_may_be_rough(server: ModelServer, prompt: str) -> None:
    got, error = await ask(server, prompt)
    assert error is None
    assert got[-1] == Finished("stop")


async def test_a_call_cut_at_the_length_limit_is_dropped(server: ModelServer) -> None:
    got, error = await ask(server, "at_length")
    assert error is None
    assert [event for event in got if not isinstance(event, UsageReport)] == [Finished("length")]


@pytest.mark.parametrize(
    ("prompt", "kind", "said"),
    [
        ("invalid", ModelProtocolError, "sent invalid JSON"),
        ("no_json", ModelProtocolError, "sent invalid JSON: what?"),
        ("endless_line", ModelProtocolError, "a line of more than 8388608 bytes"),
        ("bad_request", ModelRefused, "400: bad *** thing"),
        ("wrong_key", ModelAuthFailed, "401, the key was refused: Incorrect API key provided: ***"),
        ("forbidden", ModelAuthFailed, "403, the key was refused: no entry"),
        ("page", ModelProtocolError, "answered with a web page, not with a stream; is the base URL right?"),
        ("page_404", ModelRefused, "is the base URL right"),
        ("unstreamed_error", ModelRefused, "error: no such model"),
        ("unstreamed", ModelProtocolError, "answered with application/json, not with a stream"),
        ("error_later", ModelBusy, "error: Overloaded"),
        ("much_later", ModelBusy, "429: scripted 429"),
    ],
)
async def test_one_clear_line_and_no_second_request(
    server: ModelServer, prompt: str, kind: type[ModelError], said: str
) -> None:
    requests = len(server.requests())
    got, error = await ask(server, prompt, key=KEY, **NOW)
    assert type(error) is kind
    assert said in str(error)
    assert KEY not in str(error)
    assert "\n" not in str(error)
    assert [event for event in got if isinstance(event, Retrying)] == []
    assert len(server.requests()) == requests + 1
    assert server.requests()[-1]["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("prompt", ["error_first", "limit_once", "dropped"])
async def test_what_failed_before_anything_came_is_tried_again(server: ModelServer, prompt: str) -> None:
    got, error = await ask(server, prompt, **NOW)
    if prompt == "dropped":  # the head of the answer had come, so the far end had begun
        assert isinstance(error, ModelTruncated)
        return
    assert error is None
    assert isinstance(got[0], Retrying)
    assert text_of(got) == "fine"


async def test_three_attempts_and_no_more(server: ModelServer) -> None:
    requests = len(server.requests())
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    got, error = await ask(server, "unavailable", sleep=sleep, delays=lambda: iter([1.0, 2.0, 4.0]))
    assert isinstance(error, ModelRefused)
    assert str(error).endswith("503: try later")
    assert [event.attempt for event in got if isinstance(event, Retrying)] == [1, 2]
    assert waited == [1.0, 2.0]
    assert len(server.requests()) == requests + 3


async def test_a_refused_connection_is_tried_again_and_named() -> None:
    with contextlib.closing(__import__("socket").create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    model, got = open_model(f"http://127.0.0.1:{port}/v1", **NOW), []
    with pytest.raises(
        ModelUnreachable, match="connection refused; is it running, and is the base URL right"
    ):
        await collect(model, request(), got)
    assert [type(event) for event in got] == [Retrying, Retrying]
    assert model.usage() == Usage()
    assert model.far_end() == "none"
    await model.aclose()


async def test_a_server_that_comes_up_between_attempts() -> None:
    with contextlib.closing(__import__("socket").create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    with contextlib.ExitStack() as stack:

        async def sleep(seconds: float) -> None:
            stack.enter_context(ModelServer([[{"text": "up"}]], port=port))

        model = open_model(f"http://127.0.0.1:{port}/v1", sleep=sleep)
        assert text_of(await collect(model, request(), [])) == "up"
        await model.aclose()


async def test_a_name_that_does_not_resolve_and_a_url_that_is_none() -> None:
    model = open_model("http://no-such-host.invalid/v1", **NOW)
    with pytest.raises(ModelUnreachable, match=r"no-such-host\.invalid: the name cannot be resolved"):
        await collect(model, request(), [])
    await model.aclose()
    model = open_model("http://exa mple/v1", **NOW)
    with pytest.raises(ModelError) as caught:
        await collect(model, request(), [])
    assert "\n" not in str(caught.value)
    await model.aclose()


# --- clocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "clocks", "clock"),
    [
        ("black_hole", Clocks(idle=0.3), "idle"),
        ("no_headers", Clocks(first_byte=0.3), "first_byte"),
        ("no_body", Clocks(first_byte=0.3), "first_byte"),
        ("trickle", Clocks(idle=0.4, total=0.8), "total"),
        ("no_headers", Clocks(total=0.3), "total"),
    ],
)
async def test_a_clock_ends_a_silent_server(
    server: ModelServer, prompt: str, clocks: Clocks, clock: str
) -> None:
    """F150: the connection is kept and nothing comes; the turn ends by itself, and says which clock it was."""
    before, began = len(server.log()), time.monotonic()
    got, error = await ask(server, prompt, clocks=clocks)
    assert isinstance(error, ModelTimeout)
    assert error.evidence["clock"] == clock
    assert time.monotonic() - began < 3
    if prompt == "black_hole":
        assert text_of(got) == "abcdefghijklmnopqrst"
    await until(lambda: [event for event in server.log()[before:] if event["ev"] in ("fin", "rst")])


async def test_keep_alives_are_signs_of_life(server: ModelServer) -> None:
    got, error = await ask(server, "keep_alives", clocks=Clocks(idle=0.5))
    assert error is None
    assert text_of(got) == "ab"


async def test_the_connect_clock() -> None:
    with ModelServer(backlog_full=True) as full:
        model = open_model(full.base_url, connect_s=0.2)
        with pytest.raises(ModelTimeout, match=r"no connection within 0\.2 s") as caught:
            await collect(model, request(), [])
        assert caught.value.evidence["clock"] == "connect"
        assert model.open_sockets() == []
        await model.aclose()


async def test_the_age_of_the_last_sign_of_life(server: ModelServer) -> None:
    model, got = open_model(server.base_url), []
    task = asyncio.create_task(collect(model, request("black_hole"), got))
    await until(lambda: len(got) == 5)
    first = model.last_life
    await asyncio.sleep(0.1)
    assert model.last_life == first
    assert time.monotonic() - first >= 0.1
    model.shut()
    task.cancel()
    await asyncio.wait([task])
    await model.aclose()


# --- ways to the server ----------------------------------------------------------------------------------------------


async def test_loopback_bypasses_the_proxy(server: ModelServer) -> None:
    _, error = await ask(
        server, environ={"HTTP_PROXY": "http://127.0.0.1:1", "ALL_PROXY": "http://127.0.0.1:1"}
    )
    assert error is None


async def test_a_proxy_is_used_and_hung_up_on(server: ModelServer) -> None:
    """The scripted server stands in for the proxy: it is asked for the whole URL."""
    model, got = open_model("http://model.example/v1", environ={"http_proxy": f"127.0.0.1:{server.port}"}), []
    task = asyncio.create_task(collect(model, request("black_hole"), got))
    await until(lambda: got)
    assert server.requests()[-1]["target"] == "http://model.example/v1/chat/completions"
    assert open_to(server.port)
    model.shut()
    assert open_to(server.port) == []
    task.cancel()
    await asyncio.wait([task])
    await model.aclose()


async def test_a_proxy_that_cannot_be_used_is_named() -> None:
    model = open_model("http://model.example/v1", environ={"ALL_PROXY": "socks5://127.0.0.1:1"})
    with pytest.raises(ConfigError, match="HTTP_PROXY: expected an http:// proxy, got one with socks5://"):
        await collect(model, request(), [])
    await model.aclose()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
async def test_real_tls_streams_stops_and_refuses_a_bad_certificate(
    server: ModelServer, tmp_path: Path
) -> None:
    certificate = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward, back = await asyncio.open_connection("127.0.0.1", server.port)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(65536):
                    sink.write(data)
                    await sink.drain()
            ended.set()
            sink.close()

        await asyncio.gather(pump(reader, back), pump(onward, writer))

    ended = asyncio.Event()
    front = await asyncio.start_server(forward, "127.0.0.1", 0, ssl=context)
    port = front.sockets[0].getsockname()[1]
    url = f"https://127.0.0.1:{port}/v1"
    async with front:
        trusting = ssl.create_default_context(cafile=certificate)
        model = open_model(url, context=trusting)
        assert "hällo" in text_of(await collect(model, request("whole"), []))
        got: list[ModelEvent] = []
        task = asyncio.create_task(collect(model, request("black_hole"), got))
        await until(lambda: got)
        ended.clear()
        assert [s.phase for s in model.shut()] == ["streaming"]
        assert model.open_sockets() == []
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await ended.wait()
        await model.aclose()

        suspicious = open_model(url, context=ssl.create_default_context(), **NOW)
        tries: list[ModelEvent] = []
        with pytest.raises(ModelUnreachable, match="TLS failed: self-signed certificate"):
            await collect(suspicious, request(), tries)
        assert tries == []
        assert suspicious.open_sockets() == []
        await suspicious.aclose()


def make_certificate(folder: Path) -> Path:
    """Return a file with a key and a certificate for 127.0.0.1."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    certificate.write_text(certificate.read_text() + key.read_text())
    return certificate


# --- choosing a model ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "key", "kind", "said"),
    [
        (
            ModelChoice(provider="anthropic"),
            "",
            UsageError,
            "--provider anthropic: not built yet; now there are",
        ),
        (ModelChoice(provider="foo"), "", UsageError, "--provider foo: unknown"),
        (ModelChoice(provider="openai"), "", ModelAuthFailed, "set PERI_API_KEY or OPENAI_API_KEY"),
        (ModelChoice(provider="openai"), KEY, UsageError, "no model named"),
        (
            ModelChoice(provider="openai", base_url="http://x/v1"),
            "a\nb",
            ConfigError,
            "a header cannot carry",
        ),
        (
            ModelChoice(provider="openai", base_url="http://x/v1"),
            "schlüssel",
            ConfigError,
            "a header cannot carry",
        ),
    ],
)
def test_a_choice_that_cannot_be_served(
    choice: ModelChoice, key: str, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said) as caught:
        open_choice(choice, key=key, environ={})
    assert key not in str(caught.value) or not key


async def test_a_choice_that_can(server: ModelServer) -> None:
    model = open_choice(ModelChoice(provider="openai", base_url=server.base_url), key=KEY, environ={})
    got: list[ModelEvent] = []
    assert text_of(await collect(model, request(), got)) == "ok"
    assert model.name == "default"
    await model.aclose()
    assert open_choice(ModelChoice(), environ={}).name == "offline"


def test_importing_layer_four_loads_no_http_client() -> None:
    import sys

    code = (
        "import sys, peri_tui.net, peri_tui.agent.models.registry, peri_tui.agent.models.openai\n"
        "bad = {'httpx', 'httpcore', 'anyio', 'openai', 'anthropic', 'mcp', 'acp', 'pydantic', 'urllib.request'}\n"
        "print(sorted(bad & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_transport_does_not_start_without_a_loop() -> None:
    assert ModelTransport(environ={}).shut() == []
