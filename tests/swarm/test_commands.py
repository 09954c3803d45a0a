"""The commands as users run them: one swarm of real processes, started by them and looked at through them."""

import json
import shutil
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from commands import Running, command, sentence
from transformers import AutoModelForCausalLM, AutoTokenizer, BartConfig, LlamaConfig

from swarmllm import embedded_model_path
from swarmllm.__main__ import main
from swarmllm.client.distributed_model import DistributedModelForCausalLM
from swarmllm.commands.generate import _tokens_left

MODEL = embedded_model_path()
LOCAL_HOST = "/ip4/127.0.0.1/tcp/0"
NOBODY = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWFfoRMzqUD91vDKX6igC7p7M2G2EMN2SZG28GBvt4SvGU"
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def bootstrap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a `swarmllm dht`."""
    with Running("dht", "--host-maddrs", LOCAL_HOST, log=tmp_path_factory.mktemp("dht") / "log") as dht:
        (maddr,) = dht.maddrs()
        yield maddr
        assert dht.stop(signal.SIGTERM) == 0


@pytest.fixture(scope="module")
def servers(bootstrap: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The lines of two servers that are ready: settings from a file, and flags on top of it."""
    directory = tmp_path_factory.mktemp("servers")
    settings = directory / "server.toml"
    settings.write_text(
        f'model = "{MODEL}"\nnum-blocks = 5\nhost_maddrs = ["{LOCAL_HOST}"]\npublic_name = "from a file"\n'
        'dtype = "float32"\nquant_type = "none"\nnum_threads = 1\nupdate_period = 4\n'
    )
    with ExitStack() as stack:
        file = ["--config", settings]
        join = ["--initial_peers", bootstrap]
        first = stack.enter_context(Running("server", *file, *join, log=directory / "first.log", from_nothing=True))
        # Starts while the first one does, and is told where to join when that one is online.
        second = stack.enter_context(
            Running("server", *file, "--initial-peers", "-", "--num-blocks=3", log=directory / "second.log")
        )
        lines = first.lines_until_join()
        second.tell(bootstrap)
        lines += second.lines_until_join()
        yield lines
        with ThreadPoolExecutor() as both:
            assert list(both.map(lambda server: server.stop(signal.SIGINT), (first, second))) == [0, 0]


@pytest.fixture(scope="module")
def local() -> Any:
    """The model and its tokenizer in this process."""
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32"), AutoTokenizer.from_pretrained(MODEL)


def generate_locally(local: Any, text: str, **options: Any) -> tuple[str, str]:
    """All of the text, and only the new one."""
    model, tokenizer = local
    inputs = tokenizer(text, return_tensors="pt")
    ids = model.generate(**inputs, **{"do_sample": False, **options})[0]
    new = ids[inputs.input_ids.shape[1] :]
    return tokenizer.decode(ids, skip_special_tokens=True), tokenizer.decode(new, skip_special_tokens=True)


def test_servers_choose_the_weakest_blocks(servers: list[str]) -> None:
    serving = [line for line in servers if line.startswith("swarmllm: serving")]
    assert [line.partition(" as ")[0] for line in serving] == [
        f"swarmllm: serving blocks [0, 5) of {MODEL}",
        f"swarmllm: serving blocks [5, 8) of {MODEL}",
    ]
    assert len(servers) == 4


def test_status_for_people(bootstrap: str, servers: list[str]) -> None:
    done = command("status", "--initial_peers", bootstrap)
    assert done.returncode == 0, done.stderr
    for expected in (
        Path(MODEL).name,
        "█████···",
        "·····███",
        "0:5",
        "5:8",
        "online",
        "from a file",
        "all 8 blocks are served",
    ):
        assert expected in done.stdout
    assert done.stderr == ""


def test_status_for_programs(bootstrap: str, servers: list[str]) -> None:
    done = command("status", "--json", "--model", Path(MODEL).name, "--initial-peers", bootstrap)
    (model,) = json.loads(done.stdout)["models"]
    assert (model["name"], model["num_blocks"], model["missing_blocks"]) == (Path(MODEL).name, 8, [])
    assert model["expected_ms_per_token"] > 0
    assert sorted((s["start"], s["end"], s["state"]) for s in model["servers"]) == [(0, 5, "online"), (5, 8, "online")]
    assert all(server["throughput"] > 0 for server in model["servers"])


def test_models_that_fit_the_machines_of_the_swarm(bootstrap: str, servers: list[str]) -> None:
    done = command("models", "--json", "--model", MODEL, "--initial_peers", bootstrap)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "2 machines of the swarm" in found["machines"]
    own, *known = found["models"]
    assert (own["model"], own["is_here"], own["fits"], own["quant_type"]) == (MODEL, True, True, "int8")
    assert [blocks["blocks"] for blocks in own["route"]] == ["0:8"]
    assert all(one["fits"] == (one["missing_bytes"] == 0) for one in known)
    assert len(known) == len({one["model"] for one in known}) >= 10


def test_status_of_a_directory(bootstrap: str, servers: list[str], tmp_path: Path) -> None:
    done = command("status", "--json", "--model", MODEL, "--initial_peers", bootstrap)
    assert [len(model["servers"]) for model in json.loads(done.stdout)["models"]] == [2]
    done = command("status", "--model", tmp_path, "--initial_peers", bootstrap)
    assert (done.returncode, sentence(done.stderr)) == (
        2,
        f"swarmllm: {tmp_path} has no config.json, so it is no checkpoint of transformers, and there is no GGUF file",
    )


def test_status_of_a_model_that_nobody_serves(bootstrap: str, servers: list[str]) -> None:
    done = command("status", "--model", "some/other", "--initial_peers", bootstrap)
    assert done.returncode == 1
    assert sentence(done.stderr) == f"swarmllm: nobody in this swarm serves some/other; it serves {Path(MODEL).name}"


def test_generate_writes_what_the_local_model_writes(bootstrap: str, servers: list[str], local: Any) -> None:
    shared = ["--model", MODEL, "--dtype", "float32", "--max-new-tokens", 40, "--initial_peers", bootstrap]
    with ThreadPoolExecutor() as both:
        greedy = both.submit(command, "generate", *shared, PROMPT)
        sampled = both.submit(command, "generate", *shared, "--seed", 5, "--top_p", 0.9, stdin=PROMPT)
    assert greedy.result().stdout == generate_locally(local, PROMPT, max_new_tokens=40)[0] + "\n"
    torch.manual_seed(5)
    expected, _ = generate_locally(local, PROMPT, max_new_tokens=40, do_sample=True, top_p=0.9)
    assert sampled.result().stdout == expected + "\n"
    assert (greedy.result().returncode, greedy.result().stderr) == (0, "")


def test_generate_ends_where_the_context_does(bootstrap: str, servers: list[str], local: Any) -> None:
    shared = ["--model", MODEL, "--dtype", "float32", "--initial_peers", bootstrap]
    context = local[0].config.max_position_embeddings
    word, num_tokens = " the", len(local[1]("the").input_ids)
    while len(local[1](word.strip() + word * num_tokens).input_ids) < context - 2:
        num_tokens += 1
    nearly = word.strip() + word * num_tokens
    with ThreadPoolExecutor() as both:
        fits = both.submit(command, "generate", *shared, "--max_new_tokens", 9, stdin=nearly)
        too_long = both.submit(command, "generate", *shared, stdin=nearly + word * 2)
    assert fits.result().stdout == generate_locally(local, nearly, max_new_tokens=2)[0] + "\n"
    assert f"at most 2 tokens follow this prompt: the model's maximum is {context}" in fits.result().stderr
    assert too_long.result().returncode == 2
    assert f"the model's maximum is {context} tokens, but the prompt has {context}" in sentence(
        too_long.result().stderr
    )


def test_the_text_of_an_encoder_takes_no_room_from_what_is_written() -> None:
    bart, llama = (SimpleNamespace(config=kind(max_position_embeddings=64)) for kind in (BartConfig, LlamaConfig))
    assert (_tokens_left(bart, 64, 40), _tokens_left(llama, 60, 40)) == (40, 4)


@pytest.mark.rotates(3)
def test_ways_to_choose_tokens_that_transformers_lacks(
    bootstrap: str, servers: list[str], local: Any, tmp_path: Path
) -> None:
    """The file of --config and generate() have the same names, and texts are those of the local model."""
    simple_file, drawn_file = tmp_path / "fsd.toml", tmp_path / "mirostat.toml"
    simple_file.write_text("fsd-alpha = 0.5\nfsd_k = 4\n")
    drawn_file.write_text("mirostat_mode = 2\n")
    model, _ = local
    kind = type(model)
    model.__class__ = type(kind.__name__, (DistributedModelForCausalLM, kind), {"swarm": None})
    shared = ["--model", MODEL, "--dtype", "float32", "--max-new-tokens", 30, "--initial_peers", bootstrap]
    try:
        with ThreadPoolExecutor() as both:
            simple = both.submit(command, "generate", *shared, "--config", simple_file, PROMPT)
            drawn = both.submit(command, "generate", *shared, "--config", drawn_file, "--seed", 5, PROMPT)
            expected, _ = generate_locally(local, PROMPT, max_new_tokens=30, fsd_alpha=0.5, fsd_k=4)
            torch.manual_seed(5)
            surprising, _ = generate_locally(local, PROMPT, max_new_tokens=30, do_sample=True, mirostat_mode=2)
            assert (simple.result().stdout, simple.result().stderr) == (expected + "\n", "")
            assert (drawn.result().stdout, drawn.result().stderr) == (surprising + "\n", "")
    finally:
        model.__class__ = kind


@pytest.mark.rotates(3)
def test_status_says_what_servers_have_done(bootstrap: str, servers: list[str]) -> None:
    """Health as each announces it, some seconds after somebody used them."""
    ids = "7,8,9"
    command(
        "generate", "--model", MODEL, "--dtype", "float32", "--max_new_tokens", 5, "--initial_peers", bootstrap, ids
    )
    for _ in range(60):
        done = command("status", "--json", "--initial_peers", bootstrap)
        (model,) = json.loads(done.stdout)["models"]
        if all(server["tokens_served"] >= 5 for server in model["servers"]):
            break
    for server in model["servers"]:
        assert server["tokens_served"] >= 5
        assert server["failures_seen"] == 0
        assert 0 < server["step_ms_p95"] < 60_000
    header = command("status", "--initial_peers", bootstrap).stdout
    assert all(column in header for column in ("p95 ms", "served", "failed"))


def test_chat(bootstrap: str, servers: list[str], local: Any) -> None:
    questions = ["Where does a fish live?", "What does a hen eat?"]
    done = command(
        "chat",
        *("--model", MODEL, "--dtype", "float32", "--max_new_tokens", 12, "--initial_peers", bootstrap),
        stdin="\n".join([*questions, "/exit", "not this"]),
    )
    assert done.returncode == 0, done.stderr
    messages: list[dict[str, str]] = []
    num_cut = 0
    for question in questions:
        messages.append({"role": "user", "content": question})
        text = local[1].apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = local[1](text, add_special_tokens=False, return_tensors="pt")
        output = local[0].generate(**ids, do_sample=False, max_new_tokens=12)[0]
        num_cut += output[-1] != local[1].eos_token_id
        answer = local[1].decode(output[ids.input_ids.shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
    assert done.stdout == "".join(f"{m['content'].lstrip()}\n" for m in messages if m["role"] == "assistant")
    assert not done.stdout.startswith(" ")
    assert done.stderr.count("the answer was cut: it has the 12 tokens of max_new_tokens") == num_cut


@pytest.mark.rotates(3)
def test_what_can_be_typed_while_chatting(bootstrap: str, servers: list[str], local: Any, tmp_path: Path) -> None:
    """Several lines as one, a system prompt, the conversation on disk, and another model."""
    saved, taught = tmp_path / "chat.json", shutil.copytree(MODEL, tmp_path / "embedded")
    tokenizer = AutoTokenizer.from_pretrained(taught)
    tokenizer.chat_template = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}assistant:"
    tokenizer.save_pretrained(taught)
    lines = [
        "/system Answer in one word.",
        "Where does a fish \\",
        "live?",
        f"/save {saved}",
        f"/save {saved}",
        "/save",
        f"/save {tmp_path}/no/where",
        "/model",
        "/models",
        f"/model {MODEL}",
        "/system Answer in one word.",
        "/system",
        "/quit",
    ]
    shared = ("--model", taught, "--dtype", "float32", "--max_new_tokens", 12, "--initial_peers", bootstrap)
    done = command("chat", *shared, stdin="\n".join(lines))
    assert done.returncode == 0, done.stderr
    system, question, answer = json.loads(saved.read_text())
    assert system == {"role": "system", "content": "Answer in one word."}
    assert question == {"role": "user", "content": "Where does a fish \nlive?"}
    assert (answer["role"], answer["content"].lstrip()) == ("assistant", done.stdout.removesuffix("\n"))
    text = tokenizer.apply_chat_template([system, question], add_generation_prompt=True, tokenize=False)
    ids = local[1](text, add_special_tokens=False, return_tensors="pt")
    output = local[0].generate(**ids, do_sample=False, max_new_tokens=12)[0]
    assert answer["content"] == local[1].decode(output[ids.input_ids.shape[1] :], skip_special_tokens=True)
    told = done.stderr.splitlines()
    assert told[:6] == [
        "Answer in one word.",
        f"saved 3 messages to {saved}",
        f"there is a file {saved} already: choose another name",
        "say where: /save FILE",
        f"can't write {tmp_path}/no/where: No such file or directory",
        str(taught),
    ]
    assert told[6].startswith("there is no /models; /clear forgets")
    assert told[7:] == ["this model's chat template has no place for a system prompt", "there is no system prompt"]


def test_a_server_leaves_when_it_is_told_to(bootstrap: str, servers: list[str], tmp_path: Path) -> None:
    args = ["--model", MODEL, "--block-indices", "2:4", "--host_maddrs", LOCAL_HOST, "--initial-peers", bootstrap]
    with Running("server", *args, "--num_threads", 1, log=tmp_path / "log") as server:
        peer_id = server.maddrs()[0].rpartition("/")[2]
        assert peer_id in command("status", "--json", "--initial_peers", bootstrap).stdout
        assert server.stop(signal.SIGTERM) == 0
    assert peer_id not in command("status", "--json", "--initial_peers", bootstrap).stdout


@pytest.mark.rotates(3)
def test_a_bootstrap_peer_keeps_its_address(tmp_path: Path) -> None:
    args = ["--host_maddrs", LOCAL_HOST, "--identity_path", tmp_path / "key"]
    with Running("dht", *args, log=tmp_path / "log") as dht:
        (maddr,) = dht.maddrs()
        assert dht.stop(signal.SIGINT) == 0
    port = maddr.split("/")[4]
    with Running("dht", *args, "--port", port, log=tmp_path / "log") as dht:
        assert dht.maddrs() == [maddr]
        (daemon,) = [child for child in psutil.Process(dht.process.pid).children() if "p2pd" in child.name()]
        daemon.kill()
        assert dht.process.wait(120) == 1
    assert "daemon (p2pd) died" in (tmp_path / "log").read_text()


UNUSABLE = {
    "unknown flag": (["status", "--no_such_flag"], "--no_such_flag"),
    "a client's flag": (
        ["server", "--model", MODEL, "--new_swarm", "--head", "int8"],
        "--head is a setting of clients",
    ),
    "no peers": (["status", "--no_lan_discovery"], "--initial_peers"),
    "not an address": (["status", "--initial_peers", "localhost:80"], "localhost:80"),
    "no model": (["generate", "hello"], "--model"),
    "temperature": (["chat", "--model", MODEL, "--temperature", "0"], "temperature"),
    "indices": (["server", "--model", MODEL, "--new_swarm", "--block_indices", "4:2"], "4:2"),
    "both": (["server", "--model", MODEL, "--new_swarm", "--num_blocks", "1", "--block_indices", "0:1"], "not both"),
    "no swarm": (["server", "--model", MODEL, "--no_lan_discovery"], "--new_swarm"),
    "no prompt": (["generate", "--model", MODEL, "--initial_peers", NOBODY], "prompt is empty"),
    "invite": (["generate", "--initial_peers", "swarm:abc", "hello"], "swarm:abc"),
    "no invite": (["dht", "--model", "m"], "--invite"),
    "blocks": (["server", "--model", MODEL, "--new_swarm", "--block_indices", "4:12"], "has blocks 0:8"),
    "file": (["dht", "--config", "no/such/file"], "no/such/file"),
    "port": (["dht", "--port", "70000"], "70000"),
    "two models": (["demo", "--embedded", "--model", "m"], "give one of them"),
    "command": (["sing"], "sing"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_unusable_arguments_are_one_sentence(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process; that codes are those of processes is seen below and above."""
    args, expected = UNUSABLE[name]
    monkeypatch.setattr(sys, "stdin", StringIO(""))
    try:
        code = main(args)
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr()
    assert code == 2, said.err
    assert expected in sentence(said.err)
    assert said.out == ""


def test_unusable_arguments_end_the_process() -> None:
    done = command(*UNUSABLE["no prompt"][0])
    assert done.returncode == 2, done.stderr
    assert UNUSABLE["no prompt"][1] in sentence(done.stderr)
    assert done.stdout == ""


@pytest.mark.parametrize("args", [["status"], ["server", "--model", MODEL]], ids=["status", "server"])
def test_peers_that_cannot_be_reached(args: list[str]) -> None:
    done = command(*args, "--initial_peers", NOBODY)
    assert done.returncode == 1, done.stderr
    assert NOBODY in done.stderr.strip().split("\n")[-1]
    assert "Traceback" not in done.stderr


def test_ctrl_c_ends_generate(bootstrap: str, servers: list[str], tmp_path: Path) -> None:
    args = ["--model", MODEL, "--max_new_tokens", 1900, "--temperature", 2.0, "--initial_peers", bootstrap, PROMPT]
    with Running("generate", *args, log=tmp_path / "log") as generate:
        assert generate.process.stdout is not None
        assert generate.process.stdout.read(40).startswith(PROMPT)
        assert generate.stop(signal.SIGINT) == 130
    assert (tmp_path / "log").read_text() == ""
