"""A part of a request in other hands stands where its request stood."""

from helpers.clusters import CAMPING, session_of
from helpers.support import outline_of

from specsot.engine.cluster.driver.course import new_course
from specsot.engine.prepare.request_settings import RequestSettings
from specsot.states.request_table import RequestTable


def test_parts_keep_the_arrival_of_their_request() -> None:
    session = session_of("bim_plain", outline=outline_of(2))
    driver: RequestTable = session.board()["branches"].table
    new_course(session, driver, CAMPING)
    course = new_course(session, driver, CAMPING)
    course.parse_()
    worker: RequestTable = session.board()["branches"].table
    for handed in (course.branch_work(course.request.branches), course.branch_work([])):
        part = session.request(CAMPING, RequestSettings(handed=handed))
        worker.add(part)
        assert part.arrival == course.request.arrival == 1, "though it came first here"
