"""Homes that train together: as good as one run on all data, whatever some of them do."""

import asyncio
import itertools
import json
import math
import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from together_homes import (
    HERE,
    LENGTH,
    LR,
    Home,
    HomePlan,
    base_weights,
    held_out_loss,
    homes,
    loss_of_one_run,
    texts,
    untrained_model,
)
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from swarmllm.errors import ConfigurationError, MissingBlocksError
from swarmllm.invite import read_invite
from swarmllm.network.p2p.identity import Identity, lock_identity
from swarmllm.network.p2p.peer import Peer
from swarmllm.network.wire.protocol import MessageType, hello
from swarmllm.training import RunSettings, Together, TogetherCallback, members, together
from swarmllm.training.differences import Rules, packed_bytes
from swarmllm.training.homes import HOMES_FILE
from swarmllm.training.privacy import epsilon_of
from swarmllm.training.rounds import membership
from swarmllm.training.run_log import LOG_FILE, is_genuine_line, run_summary
from swarmllm.training.together import INVITE_FILE

pytestmark = pytest.mark.timeout(900)
CLOSE_TO = 1.02
"""The loss may be this much larger than that of one run."""


def invite_of(home: Path) -> str:
    """The invite of a home that has begun."""
    path = home / INVITE_FILE
    changed = threading.Event()
    while not path.exists():
        changed.wait(0.05)
    return str(path)


def lines(home: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (home / LOG_FILE).read_text().splitlines()]


def in_threads(calls: list[Callable[[], None]]) -> None:
    errors: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=[call]) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def small_home(directory: Path, run: str, seed: int, steps: int, **settings: Any) -> tuple[Together, torch.nn.Linear]:
    """A home that learns a linear map from its own examples."""
    model = torch.nn.Linear(40, 4)
    torch.nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(seed))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(seed)
    chosen = RunSettings(host_maddrs=HERE, name=f"home {seed}", **settings)

    def loss_of(texts: Sequence[str]) -> float:
        inputs = torch.eye(40)[: sum(map(len, texts))]
        return (model(inputs) - 1).square().mean().item()

    with Together(optimizer, run, every=5, directory=directory, settings=chosen, loss_of=loss_of) as together:
        for _ in range(steps):
            inputs = torch.randn(8, 40, generator=generator)
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            together.count(8, loss.item())
            optimizer.step()
            optimizer.zero_grad()
    return together, model


def test_two_homes_end_with_the_same_values_and_a_signed_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found: dict[int, tuple[Together, torch.nn.Linear]] = {}
    first, second = tmp_path / "first", tmp_path / "second"

    def one() -> None:
        found[0] = small_home(first, "a run", 0, 22, wait_for=2, common_texts=("a", "few letters"))

    def other() -> None:
        found[1] = small_home(second, invite_of(first), 1, 22, wait_for=2)

    in_threads([one, other])
    assert torch.equal(found[0][1].weight, found[1][1].weight)
    assert found[0][0].round == found[1][0].round == 5  # four of 5 steps, and one of the last 2
    logs = [lines(first), lines(second)]
    assert all(map(is_genuine_line, (*logs[0], *logs[1])))
    assert [line["digest"] for line in logs[0][:5]] == [line["digest"] for line in logs[1][:5]]
    for line in (*logs[0][:5], *logs[1][:5]):
        assert sorted(member["name"] for member in line["members"]) == ["home 0", "home 1"]
    assert [member["tokens"] for member in logs[0][1]["members"]] == [40, 40]
    assert sum(member["tokens"] for line in logs[0] for member in line["members"]) == 2 * 22 * 8
    assert (first / INVITE_FILE).stat().st_mode & 0o77 == 0
    check_losses_on_common_texts(found[0][0], logs)

    assert Identity.load(first / "identity.key").peer_id in (second / HOMES_FILE).read_text()
    monkeypatch.setattr(members, "ALONE_AFTER_S", 1.0)
    invite = Path(invite_of(first)).rename(tmp_path / "invite of ours.txt")
    again, model = small_home(second, str(invite), 1, 3, wait_for=2)  # the others have left: it goes on alone
    assert "1 of 2 homes are here after 1 s; going on" in caplog.text
    assert again.round == 6
    assert len(run_summary(second / LOG_FILE).shared_losses) == 7  # it has kept the common texts
    assert not torch.equal(model.weight, found[0][1].weight)


def check_losses_on_common_texts(together: Together, logs: list[list[dict[str, Any]]]) -> None:
    """Both homes measure the same shared values, and say how good their own ones are."""
    for *rounds, end in logs:
        for line in rounds:
            first, second = line["members"]
            assert first["shared_loss"] == pytest.approx(second["shared_loss"])
            assert first["own_loss"] != pytest.approx(second["own_loss"])
        shared = [line["members"][0]["shared_loss"] for line in rounds]
        assert all(after < before for before, after in itertools.pairwise([*shared, end["shared_loss"]]))
        assert (end["round"], end["members"]) == (5, [])
        assert end["shared_loss"] == pytest.approx(together.shared_loss)


def test_a_founder_that_starts_again_finds_those_who_went_on(tmp_path: Path) -> None:
    """It has no invite: it remembers where the other home is. Its own address, and so its old invites, stay right."""
    first, second = tmp_path / "first", tmp_path / "second"
    has_left, is_back, addresses = threading.Event(), threading.Event(), list[str]()

    def founder() -> None:
        small_home(first, "a run", 0, 5, wait_for=2, patience_s=1)
        addresses.append(read_invite(str(first / INVITE_FILE)).initial_peers[0])
        has_left.set()
        small_home(first, "a run", 0, 5, wait_for=2, patience_s=1)  # it waits until both are in it
        addresses.append(read_invite(str(first / INVITE_FILE)).initial_peers[0])
        is_back.set()

    def other() -> None:
        optimizer = torch.optim.SGD(torch.nn.Linear(40, 4).parameters(), lr=0.05)
        settings = RunSettings(host_maddrs=HERE, wait_for=2, patience_s=1)
        with Together(optimizer, invite_of(first), every=5, directory=second, settings=settings):
            for _ in range(5):
                optimizer.step()
            assert is_back.wait(200)

    in_threads([founder, other])
    assert has_left.is_set()
    assert lines(first)[-1]["round"] > 0
    assert addresses[0] == addresses[1]


def test_homes_that_each_went_on_alone_find_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have swarms of their own, as after an outage of the network."""
    first, second = tmp_path / "first", tmp_path / "second"

    def both_train(run_of_second: Callable[[], str]) -> None:
        def home(place: Path, number: int, run: Callable[[], str]) -> None:
            small_home(place, run(), number, 5, wait_for=2, patience_s=1)

        in_threads([partial(home, first, 0, lambda: "a run"), partial(home, second, 1, run_of_second)])

    both_train(lambda: invite_of(first))
    monkeypatch.setattr(together, "saved_homes", lambda _: [])  # nobody is reached at the start
    monkeypatch.setattr("swarmllm.training.homes.REUNION_S", 0.2)
    with (second / HOMES_FILE).open("a") as homes_of_second:
        homes_of_second.write(f"/no/such/address/p2p/{Identity.load(first / 'identity.key').peer_id}\n")
    both_train(lambda: "a run")
    for place in (first, second):
        assert [len(line["members"]) for line in lines(place) if line["members"]] == [2, 2]


def test_noise_is_not_taken_back_and_its_budget_outlives_the_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    noisy = {"noise_multiplier": 4.0, "clip_norm": 0.5}
    together, _ = small_home(tmp_path, "a run", 0, 10, **noisy, common_texts=("some letters",))
    assert "drowns 164 trained values" in caplog.text
    told = [line["members"][0] for line in lines(tmp_path) if line["members"]]
    assert all(one["loss"] is None and one["own_loss"] is None and one["shared_loss"] for one in told)
    assert together.epsilon() == pytest.approx(epsilon_of(1e-5, 2 / 16))
    again, _ = small_home(tmp_path, "a run", 0, 5, **noisy)
    assert again.epsilon() == pytest.approx(epsilon_of(1e-5, 3 / 16))
    open_hearted, _ = small_home(tmp_path, "a run", 0, 5)
    assert open_hearted.epsilon() == math.inf


def test_a_home_whose_values_are_nan_goes_on_from_the_shared_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    settings = RunSettings(host_maddrs=HERE, in_background=False)
    with Together(optimizer, "a run", every=1, directory=tmp_path, settings=settings) as together:
        before = model.weight.detach().clone()
        model.weight.grad = torch.full((4, 4), torch.nan)
        optimizer.step()
        assert torch.equal(model.weight, before)
        assert not optimizer.state
        assert together.round == 1
    assert "goes on from the shared values" in caplog.text


def test_homes_with_other_rules_or_models_are_told_so(tmp_path: Path) -> None:
    first, wrong = tmp_path / "first", tmp_path / "wrong"
    told = threading.Event()

    def honest() -> None:
        optimizer = torch.optim.SGD(torch.nn.Linear(40, 4).named_parameters("q_proj"), lr=0.05)
        with Together(optimizer, "a run", directory=first, settings=RunSettings(host_maddrs=HERE)):
            told.wait(200)

    def others() -> None:
        try:
            invite = invite_of(first)
            with pytest.raises(ConfigurationError, match="different rules"):
                small_home(wrong / "rules", invite, 1, 3, outer_lr=1.0)
            with pytest.raises(ConfigurationError, match="different common texts"):
                small_home(wrong / "texts", invite, 1, 3, common_texts=("others",))
            wide, named = torch.nn.Linear(41, 4), torch.nn.Linear(40, 4)
            for parameters, mend in (
                (wide.parameters(), "different shapes"),
                (named.named_parameters("o_proj"), "different things: the list of trained parameters is 2 from ._proj"),
            ):
                optimizer = torch.optim.SGD(parameters, lr=0.05)
                with (
                    pytest.raises(ConfigurationError, match=mend),
                    Together(optimizer, invite, directory=wrong / mend[:15], settings=RunSettings(host_maddrs=HERE)),
                ):
                    pass
        finally:
            told.set()

    in_threads([honest, others])


@pytest.mark.slow
def test_five_homes_that_join_at_once_take_part(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two of them have the same data, so their differences are equal. Nobody is called a liar, and all end alike.

    They wait for each round: in the background one that is slow has a round more than the others.
    """
    first = tmp_path / "0"
    found: dict[int, tuple[Together, torch.nn.Linear]] = {}
    ready = threading.Barrier(5)

    def founder() -> None:
        found[0] = small_home(first, "a run", 0, 40, wait_for=6, in_background=False)

    def joins(number: int) -> Callable[[], None]:
        def join() -> None:
            invite = invite_of(first)
            ready.wait(200)
            found[number] = small_home(
                tmp_path / str(number), invite, min(number, 4), 40, wait_for=6, in_background=False
            )

        return join

    in_threads([founder, *map(joins, range(1, 6))])
    together = [run for run, _ in found.values()]
    assert len({model.weight.detach().numpy().tobytes() for _, model in found.values()}) == 1
    bytes_a_round = packed_bytes(164)
    for run in together:
        assert run.directory is not None
        log = [line for line in lines(run.directory) if line["members"]]
        assert len(log[-1]["members"]) == 6
        assert not any(line["refused"] for line in log)
        assert run.sent_bytes < (run.round + 2) * 6 * 2 * bytes_a_round
    assert "broke the protocol" not in caplog.text


def test_strangers_are_refused(tmp_path: Path) -> None:
    """A peer that knows the address, and the run's public key, but has no invite."""
    ends = threading.Event()

    def honest() -> None:
        optimizer = torch.optim.SGD(torch.nn.Linear(40, 4).parameters(), lr=0.05)
        with Together(optimizer, "a run", directory=tmp_path / "home", settings=RunSettings(host_maddrs=HERE)) as run:
            ends.wait(200)
            assert run.num_homes == 1

    async def intrude() -> None:
        invite = read_invite(invite_of(tmp_path / "home"))
        (address,) = invite.initial_peers
        home = address.rpartition("/")[2]
        run = Identity.load(tmp_path / "home" / "run.key").peer_id
        async with await Peer.create(initial_peers=[address], client_mode=True) as peer:
            stream = await peer.open_stream(home)
            await hello(stream, fingerprint=run)
            rules = asdict(Rules())
            own = membership(peer.peer_id, Identity.generate())
            header = {"member": own, "size": 164, "shapes": "0" * 64, **rules}
            await stream.send(MessageType.MEMBER, header)
            assert (await stream.receive()).type is MessageType.ERROR
            await stream.gone

    def stranger() -> None:
        try:
            asyncio.run(intrude())
        finally:
            ends.set()

    in_threads([honest, stranger])


@pytest.mark.parametrize(
    ("arguments", "mend"),
    [
        ({"every": 0}, "every must be 1 step or more"),
        ({"every": "50"}, "every must be 1 step or more, not '50'"),
        ({"every": True}, "every must be 1 step or more, not True"),
        ({"run": ""}, "the run has no name"),
        ({"run": Path("./none.swarm")}, r"can't read the invite in none\.swarm"),
        ({"run": "swarm:e30"}, "take the one that a home of the run printed"),
        ({"run": "swarm:x"}, "is damaged"),
    ],
)
def test_mistakes_are_told_in_a_sentence(arguments: dict[str, Any], mend: str, tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.05)
    with (
        pytest.raises(ConfigurationError, match=mend),
        Together(optimizer, **{"run": "r", **arguments}, directory=tmp_path),
    ):
        pass


def test_a_directory_is_one_home_s(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.05)
    (tmp_path / "home").mkdir()
    Identity.load_or_create(tmp_path / "home" / "identity.key")
    held = lock_identity(tmp_path / "home" / "identity.key")
    with (
        pytest.raises(ConfigurationError, match="another home uses"),
        Together(optimizer, "r", directory=tmp_path / "home"),
    ):
        pass
    os.close(held)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="can't make"), Together(optimizer, "r", directory=tmp_path / "file"):
        pass


@pytest.mark.parametrize(
    ("settings", "mend"),
    [
        ({"patience_s": "5"}, "patience_s must be a number, not '5'"),
        ({"noise_multiplier": float("inf")}, "noise_multiplier must be at least 0, and finite"),
        ({"clip_norm": float("inf")}, "clip_norm must be above 0, and finite"),
        ({"common_texts": {"a": 1}}, "common_texts must be a list of texts"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], mend: str) -> None:
    with pytest.raises(ConfigurationError, match=mend):
        RunSettings(**settings)
    assert RunSettings(common_texts="one text").common_texts == ("one text",)  # type: ignore[arg-type]


def test_an_optimizer_of_accelerate(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    layer = torch.nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.05))
    settings = RunSettings(host_maddrs=HERE)
    with Together(optimizer, "r", 2, directory=tmp_path, settings=settings, model=model) as run:
        with pytest.raises(ConfigurationError, match="a step has 0 tokens or more, not -1"):
            run.count(-1)
        for _ in range(4):
            accelerator.backward(model(torch.ones(1, 4)).sum())
            optimizer.step()
    assert run.round == 2


def test_a_measurement_that_fails_moves_nothing_twice(tmp_path: Path) -> None:
    """Servers that don't answer while the shared values are measured cost this step an error, and nothing else."""
    found = []
    for fails in (False, True):
        layer = torch.nn.Linear(4, 4)
        torch.nn.init.ones_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
        measured: list[float] = []

        def loss_of(_: Sequence[str], measured: list[float] = measured, fails: bool = fails) -> float:
            measured.append(1.0)
            if fails and len(measured) == 3:  # of the own values twice, and then of the new shared ones
                raise MissingBlocksError([0])
            return 1.0

        settings = RunSettings(host_maddrs=HERE, common_texts=("a",), in_background=False)
        with Together(
            optimizer, "r", 2, directory=tmp_path / str(fails), settings=settings, loss_of=loss_of, model=layer
        ) as run:
            for step in range(6):
                layer(torch.ones(1, 4)).square().sum().backward()
                with pytest.raises(MissingBlocksError) if fails and step == 1 else nullcontext():
                    optimizer.step()
                optimizer.zero_grad()
        found.append(layer.weight.detach().clone())
        assert run.round == 3
    assert torch.equal(*found)


def test_nothing_to_train_is_told(tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ConfigurationError, match="0 trained values"):
        Together(torch.optim.SGD(layer.parameters(), lr=0.05), "r", directory=tmp_path)


def begin(start: Callable[[HomePlan], Home], root: Path, founder: Home | None, number: int, **plan: Any) -> Home:
    """A home of the run of `founder`, or the founder itself."""
    run = "a run" if founder is None else founder.invite()
    base = root / "base.pt"
    if founder is None:
        torch.save(base_weights(), base)
    return start(HomePlan(directory=str(root / str(number)), run=run, number=number, base=str(base), **plan))


@pytest.mark.slow
@pytest.mark.parametrize(("count", "steps"), [(3, 640), (8, 640)])
def test_homes_learn_what_one_run_on_all_their_data_learns(count: int, steps: int, tmp_path: Path) -> None:
    with homes() as start:
        plan = {"steps": steps, "steps_of_run": steps, "wait_for": count}
        running = [begin(start, tmp_path, None, 0, **plan)]
        running += [begin(start, tmp_path, running[0], number, **plan) for number in range(1, count)]
        results = [home.finish() for home in running]
    assert len({result["values"] for result in results}) == 1
    alone = loss_of_one_run(count, steps)
    print(f"{count} homes: loss {results[0]['loss']:.4f}, one run {alone:.4f}")
    assert results[0]["loss"] < alone * CLOSE_TO
    each_gradient = 4 * results[0]["num_values"] * steps * (count - 1)
    for result in results:
        print(f"sent {result['sent_bytes']}, each gradient {each_gradient}")
        assert result["sent_bytes"] < each_gradient / 100


@pytest.mark.slow
def test_whatever_five_of_eight_homes_do_the_others_learn(tmp_path: Path) -> None:
    """One is killed, one freezes for a while, one comes late, one sends NaN, and one 1000 times too much."""
    steps = 640
    with homes() as start:
        plan = {"steps": steps, "steps_of_run": steps, "wait_for": 7}
        first = begin(start, tmp_path, None, 0, **plan)
        honest = [first, *(begin(start, tmp_path, first, number, **plan) for number in (1, 2))]
        killed, frozen = (begin(start, tmp_path, first, number, **plan) for number in (3, 4))
        for number, fault in ((5, "nan"), (6, "big")):
            begin(start, tmp_path, first, number, **plan, fault=fault)
        first.wait_for_round(4)
        killed.process.kill()
        os.kill(frozen.process.pid, signal.SIGSTOP)
        late = begin(start, tmp_path, first, 7, steps=steps // 2, steps_of_run=steps)
        first.wait_for_round(12)
        os.kill(frozen.process.pid, signal.SIGCONT)
        results = [home.finish() for home in honest]
        late_result = late.finish()
        assert frozen.finish()["round"] > 12
    alone = loss_of_one_run(3, steps)
    print([round(result["loss"], 4) for result in (*results, late_result)], f"one run {alone:.4f}")
    for result in results:
        assert result["loss"] < alone * CLOSE_TO
    log = lines(tmp_path / "0")
    assert all(is_genuine_line(line) for line in log)
    counted = [{member["name"] for member in line["members"]} for line in log]
    assert not any("home 5" in names for names in counted)  # NaN
    assert all(member["share"] < 0.01 for line in log for member in line["members"] if member["name"] == "home 6")
    assert any("home 7" in names for names in counted)
    assert "home 3" not in counted[-1]


class Report(TrainerCallback):
    """Keeps what a report would show, as MLflow's and TensorBoard's callbacks do."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        self.logs.append(dict(logs))


def test_a_callback_of_transformers_trainer(tmp_path: Path) -> None:
    """A home alone: rounds go on, its log has the Trainer's tokens and losses, and reports have the run's figures."""
    rows = [{"input_ids": row, "labels": row} for row in texts(0, 24, [1])]
    settings = {"per_device_train_batch_size": 4, "logging_steps": 1, "save_steps": 3, "learning_rate": LR}
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "include_num_input_tokens_seen": "all"}
    common = RunSettings(host_maddrs=HERE, common_texts=("a", "b"), in_background=False)

    def train(steps: int, resume: bool) -> tuple[LlamaForCausalLM, TogetherCallback, list[dict[str, float]]]:
        model, report = untrained_model(), Report()

        def loss_of(given: Sequence[str]) -> float:
            assert given == ("a", "b")
            return held_out_loss(model)

        run = TogetherCallback("a run", 2, directory=tmp_path / "home", settings=common, loss_of=loss_of)
        arguments = TrainingArguments(str(tmp_path / "trainer"), max_steps=steps, **settings, **quiet)
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[report])
        run.add_to(trainer)
        trainer.train(resume_from_checkpoint=resume)
        return model, run, report.logs

    first, run, reported = train(6, resume=False)
    assert run.together is not None
    assert run.together.round == 3
    log = [line["members"][0] for line in lines(tmp_path / "home")[:3]]
    assert [member["tokens"] for member in log] == [2 * 4 * LENGTH] * 3
    assert all(member["loss"] > 1 for member in log)
    assert [one["together_round"] for one in reported if "loss" in one] == [0, 1, 1, 2, 2, 3]
    assert reported[0]["together_shared_loss"] == log[0]["shared_loss"]
    assert reported[1]["together_own_loss"] == log[0]["own_loss"]
    assert reported[-1]["together_shared_loss"] == pytest.approx(held_out_loss(first))
    assert reported[-1]["together_homes"] == 1
    with pytest.raises(ConfigurationError, match="set load_best_model_at_end=False"):
        run.on_train_begin(SimpleNamespace(load_best_model_at_end=True), None, None)
    again, run, _ = train(8, resume=True)
    assert run.together is not None
    assert run.together.round == 4
    assert not torch.equal(first.lm_head.weight, again.lm_head.weight)


def test_a_callback_begins_again_after_an_error(tmp_path: Path) -> None:
    """Servers may be lost in training; in a notebook, the next cell trains again."""
    rows = [{"input_ids": row, "labels": row} for row in texts(0, 24, [1])]
    run = TogetherCallback("a run", 2, directory=tmp_path / "home", settings=RunSettings(host_maddrs=HERE))
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    arguments = TrainingArguments(str(tmp_path / "trainer"), max_steps=4, learning_rate=LR, **quiet)
    trainer = Trainer(model=untrained_model(), args=arguments, train_dataset=rows, callbacks=[Lost()])
    run.add_to(trainer)
    with pytest.raises(MissingBlocksError):
        trainer.train()
    trainer.train()
    assert run.together is not None
    assert run.together.round == 3


class Lost(TrainerCallback):
    """Fails once, after the third step."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps += 1
        if self.steps == 3:
            raise MissingBlocksError([0])
