"""A part of a request in other hands stands where its request stood."""

from helpers.clusters import CAMPING, session_of
from helpers.support import outline_of

from specsot.engine.prepare.inputs import RequestSettings
from specsot.engine.workers.request_state import new_request_state
from specsot.states.request_table import RequestTable


def test_parts_keep_the_arrival_of_their_request() -> None:
    session = session_of("bim_plain", outline=outline_of(2))
    driver: RequestTable = session.board()["branches"].table
    new_request_state(session, driver, CAMPING)
    course = new_request_state(session, driver, CAMPING)
    course.parse_()
    worker: RequestTable = session.board()["branches"].table
    for handed in (course.part(course.request.branches), course.part([])):
        part = session.request(CAMPING, RequestSettings(handed=handed))
        worker.add(part)
        assert part.arrival == course.request.arrival == 1, "though it came first here"
