"""`specsot train answers`: the target's own answers, through any graph, as training data: a line is
one conversation's number, question and samples (`Written`) as exact ids. Graphs with an outline
give the outline and the parts as a run writes them."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

from ...states.request import Branch, Finish, Request
from ...states.text.tokens import PromptTokens
from ..errors import UsageError
from ..prepare.inputs import Prompt
from ..prepare.job import prepare
from ..prepare.options import RunOptions
from ..run.session import Session, load
from ..shell import working
from .dataset import ChatCoder, Conversation, Piece, Turn, Written, read_conversations, read_lines


def answer_file(options: RunOptions, prompts: Path, out: Path, at_once: int, length: int) -> int:
    """Answer a file's conversations through a graph; returns how many lines `out` has."""
    conversations = read_conversations(prompts, questions=True)
    options = replace(options, graph=options.graph or "autoregressive")
    rows = 1 if prepare(options).program.graph.layout.kind == "batching" else at_once
    sizes = [f"layout.max_num_branches={at_once}", f"layout.kv_slots={rows * length}"]
    job = prepare(replace(options, sets=(*sizes, *(options.sets or ()))))
    return Answering(load(job), out, length).write(conversations)


class Answering:
    """Answers conversations, many at once; lines of `out` stay, so an interrupted run continues."""

    def __init__(self, session: Session, out: Path, length: int) -> None:
        models = session.models
        stops = models.stop_ids
        self.session = session
        self.run = session.start([], lambda event: None)
        self.coder = ChatCoder(models.target.config.path.parent, models.tokenizer, stops)
        self.out = out
        self.length = length
        self.outlines = session.program.graph.skeleton is not None
        usual = models.tokenizer.eos_token_id
        self.end = usual if usual in stops else stops[0]  # the sampled one is not recorded
        self._open: dict[str, tuple[Conversation, int, list[Written]]] = {}

    def write(self, conversations: Sequence[Conversation]) -> int:
        """Answer them all; UsageError if the file holds answers to other questions."""
        done: dict[int, str] = {}
        text = self.out.read_text(encoding="utf-8") if self.out.exists() else ""
        for earlier in text.split("\n")[:-1]:  # an incomplete last line is dropped
            value = json.loads(earlier)
            number = value["number"]
            if number >= len(conversations) or value["question"] != conversations[number].text:
                raise UsageError(f"{self.out}: holds answers to other prompts; another --out")
            done[number] = earlier + "\n"
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text("".join(done.values()), encoding="utf-8")
        waiting = iter([n for n in range(len(conversations)) if n not in done])
        count = len(done)
        manager = self.run.manager
        limit = 2 * self.session.program.graph.layout.max_num_branches
        title = f"{self.out.name}: {{}} of {len(conversations)} answers"
        with self.out.open("a", encoding="utf-8") as file, working(title.format(count)) as tell:
            while True:
                for number in islice(waiting, limit - len(manager.table.unfinished)):
                    self._submit(number, conversations[number], 0, [])
                if not manager.table.unfinished:
                    break
                self.run.step()
                for request in manager.table.forget_finished():
                    if line := self._finished(request):
                        file.write(line)
                        file.flush()
                        count += 1
                        tell(title.format(count))
        self.run.close()
        return len(read_lines(self.out))

    def _submit(self, number: int, talk: Conversation, turn: int, samples: list[Written]) -> None:
        """Submit a user's turn, the first one being 0; with an outline that alone, as in a run."""
        place = talk.user_turns[turn]
        request = self.session.request(Prompt(str(number), talk.turns[place].text))
        if not self.outlines:
            ids = self.coder.prompt(talk.head(place + 1))
            request = replace(request, prefix=PromptTokens(), tail=PromptTokens(tuple(ids)))
            request.budget = min(request.budget, max(self.length - len(ids), 1))
        self._open[request.key] = talk, turn, samples
        self.run.manager.lifecycle.submit(request)

    def _finished(self, request: Request) -> str | None:
        """After a finished request: submit the next turn, or return the conversation's line."""
        talk, turn, samples = self._open.pop(request.key)
        number = int(request.key)
        branches = request.branches
        if self.outlines:
            if request.root is not None:
                _, outline = self._pieces(request.root)
                pieces = [(request.tail.ids, False), outline]
                samples.append(Written("outline", request.prefix.ids, [pieces]))
            if parts := [self._pieces(branch) for branch in branches if branch.tokens]:
                samples.append(Written("parts", request.context, parts))
        elif branches[0].finish is not Finish.REFUSED and len(branches[0].prompt) < self.length:
            talk = self._answered(talk, turn, branches[0], samples)
            if turn + 1 < len(talk.user_turns):
                self._submit(number, talk, turn + 1, samples)
                return None
        written = [asdict(sample) for sample in samples]
        line = {"number": number, "question": talk.text, "samples": written}
        return json.dumps(line, ensure_ascii=False) + "\n"

    def _answered(
        self, talk: Conversation, turn: int, branch: Branch, samples: list[Written]
    ) -> Conversation:
        """The conversation with this turn's answer, added to one sample while prompts go on."""
        (prompt, _), answer = self._pieces(branch)
        earlier = samples.pop().branches[0] if samples else []
        before = [token for part, _ in earlier for token in part]
        if list(prompt[: len(before)]) == before:
            pieces = [*earlier, (prompt[len(before) :], False), answer]
        else:
            samples.append(Written("answer", (), [earlier]))
            pieces = [(prompt, False), answer]
        samples.append(Written("answer", (), [pieces]))
        text = self.session.prompts.decode(branch.tokens)
        answer_turn = Turn("assistant", text, tuple(branch.tokens), branch.finish is Finish.STOP)
        place = talk.user_turns[turn] + 1
        questions = [later for later in talk.turns[place:] if later.role == "user"]
        return replace(talk, turns=(*talk.turns[:place], answer_turn, *questions))

    def _pieces(self, branch: Branch) -> list[Piece]:
        """A branch's own prompt and its tokens, with the stop token if it ended with one."""
        end = (self.end,) if branch.finish is Finish.STOP else ()
        return [(branch.prompt.ids, False), ([*branch.tokens, *end], True)]
