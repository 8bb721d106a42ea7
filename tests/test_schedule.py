"The schedule, against an oracle that remembers everything: whatever comes back when, lanes take turns and weights are not too old."

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from rollpipe.pipes.workers.schedule import LaneSchedule, pending_limit


class Oracle:
    "The whole history, as lists; each question is answered by going through all of it."

    def __init__(self, n_lanes, group_size, lag, order):
        self.n_lanes = n_lanes
        self.group_size = group_size
        self.lag = lag
        self.order = order
        self.history = []  # ("ask" | "answer" | "hand out", number of the request), in the order of time
        self.requests = []  # of each: its lane, has its lane ended, and the items handed out before it was made

    def did(self, what):
        return [k for event, k in self.history if event == what]

    def pending(self):
        return [k for k in range(len(self.requests)) if k not in self.did("hand out")]

    def items(self):
        return [k for k in self.did("hand out") if not self.requests[k]["ended"]]

    def group(self):
        return len(self.items()) // self.group_size

    def gone(self):
        return {self.requests[k]["lane"] for k in self.did("hand out") if self.requests[k]["ended"]}

    def limit(self):
        "How many requests may be under way: to the end of the last group that may be requested."
        if self.lag is None:
            return 2 * self.n_lanes
        return (self.group() + 1 + self.lag) * self.group_size - len(self.items())

    def next_lanes(self):
        "The lanes that may be asked next, best first: those not asked for longest."
        last = {lane: -1 for lane in range(self.n_lanes)}
        for k, request in enumerate(self.requests):
            last[request["lane"]] = k
        lanes = sorted(set(range(self.n_lanes)) - self.gone(), key=lambda lane: (last[lane], lane))
        if self.order == "canonical":
            return lanes
        load = Counter(self.requests[k]["lane"] for k in self.pending())
        return sorted(
            lanes, key=lambda lane: load[lane]
        )  # `sorted` keeps the order of lanes with the same load

    def next_done(self):
        pending = self.pending()
        answers = self.did("answer")
        if not pending:
            return None
        age = self.group() - self.requests[pending[0]]["before"] // self.group_size
        if self.order == "canonical" or self.lag is not None and age > self.lag:
            return pending[0] if pending[0] in answers else None
        return next((k for k in answers if k in pending), None)


class Run:
    "A schedule and its oracle; lane k has `lengths[k]` items."

    def __init__(self, lengths, group_size, lag, order):
        self.schedule = LaneSchedule(len(lengths), group_size, lag, order)
        self.oracle = Oracle(len(lengths), group_size, lag, order)
        self.left = list(lengths)
        self.made = []

    def ask(self):
        "Ask as far as possible, as its owner does."
        if self.schedule.group_begins:
            self.schedule.publication = (
                self.schedule.n_handed_out
            )  # the weights after that many items
        while self.schedule.has_room():
            oracle = self.oracle
            assert len(oracle.pending()) < oracle.limit()
            lane = oracle.next_lanes()[0]
            request = self.schedule.request(destination=len(self.made))
            assert (request.lane, request.group, request.destination) == (
                lane,
                oracle.group(),
                len(self.made),
            )
            oracle.history.append(("ask", len(self.made)))
            oracle.requests.append(
                dict(lane=lane, ended=self.left[lane] == 0, before=len(oracle.items()))
            )
            self.left[lane] = max(0, self.left[lane] - 1)
            self.made.append(request)
        assert (
            self.schedule.finished
            or len(self.oracle.pending()) >= self.oracle.limit()
            or not self.oracle.next_lanes()
        )

    def answer(self, pick):
        "A lane answers its oldest request; which lane, `pick` says."
        waiting = {}
        for k in self.oracle.pending():
            if self.made[k].answer is None:
                waiting.setdefault(self.made[k].lane, k)
        if not waiting:
            return
        k = waiting[sorted(waiting)[pick % len(waiting)]]
        self.schedule.answer(self.made[k], "answer", ended=self.oracle.requests[k]["ended"])
        self.oracle.history.append(("answer", k))

    def hand_out(self):
        "Hand out what is done; returns the number of the request, or None."
        k = self.oracle.next_done()
        request = self.schedule.next_done()
        assert request is (None if k is None else self.made[k])
        if k is None:
            return None
        self.check_age(request)
        self.schedule.hand_out(request)
        self.oracle.history.append(("hand out", k))
        assert set(self.schedule.turn) == set(range(self.oracle.n_lanes)) - self.oracle.gone()
        assert self.schedule.finished == (not self.schedule.turn)
        return k

    def check_age(self, request):
        "The weights of an item are those of a group that began at most `lag` groups ago."
        size, lag = self.oracle.group_size, self.oracle.lag
        if request.publication is None:
            assert lag is None or lag > 0 and self.oracle.order == "ready"
        else:
            assert (
                request.publication == request.group * size
            )  # published when the group began in which it was requested
            if not request.ended:
                assert 0 <= self.oracle.group() - request.publication // size <= lag


options = dict(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    group_size=st.integers(1, 5),
    lag=st.integers(0, 3) | st.none(),
    picks=st.lists(st.integers(0, 3), max_size=60),
)


@settings(deadline=None, max_examples=200)
@given(order=st.sampled_from(["canonical", "ready"]), **options)
def test_against_the_oracle(lengths, group_size, lag, order, picks):
    "Every item of every lane is handed out once, in the order of its lane."
    run = Run(lengths, group_size, lag, order)
    picks = iter(picks)
    while not run.schedule.finished:
        run.ask()
        assert run.oracle.pending()  # otherwise nothing would ever happen
        while run.hand_out() is None:
            run.answer(next(picks, 0))
    handed_out = [run.made[k].lane for k in run.oracle.items()]
    assert Counter(handed_out) == Counter({lane: n for lane, n in enumerate(lengths) if n})
    for lane in range(len(lengths)):
        numbers = [k for k in run.oracle.items() if run.made[k].lane == lane]
        assert numbers == sorted(numbers)


def test_how_many_requests_are_under_way():
    assert [pending_limit(3, 4, lag) for lag in (0, 1, None)] == [4, 8, 6]
    schedule = LaneSchedule(3, 4, lag=None, max_pending=5)
    while schedule.has_room():
        schedule.request()
    assert len(schedule.pending) == 5
