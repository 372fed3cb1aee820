"""Which prompts a graph's requests get: the template that suits graph and model."""

from ...states.graph.graph import Graph, Skeleton
from ...states.text.prompts import PromptBook
from ...states.text.template import TemplateError, load_template
from ...states.yaml.codes import ProblemCode
from ...states.yaml.source import Problem
from ..models import Models
from ..prepare.environment import embedded_folder


def prompt_book(graph: Graph, models: Models) -> PromptBook:
    """The graph's template over the model's tokenizer."""
    skeleton = graph.skeleton
    tokenizer = models.tokenizer
    stops = models.stop_ids
    if skeleton is None:
        return PromptBook(tokenizer, load_template(template_for(None, models)), stop_ids=stops)
    template = load_template(template_for(skeleton, models))
    if skeleton.format not in ("auto", template.format):
        message = f"its outlines are {template.format!r}, the graph says {skeleton.format!r}"
        where = "template.format"
        raise TemplateError([Problem(template.name, 0, 0, where, message, ProblemCode.TEXTS)])
    most = skeleton.max_branches
    tools = skeleton.tools
    return PromptBook(tokenizer, template, skeleton.share, stops, max_branches=most, tools=tools)


def template_for(skeleton: Skeleton | None, models: Models) -> str:
    """The template that the graph names, or the one for this model.

    The embedded model's own is for models that write conversations exactly as it does. Others are
    asked for the format that the graph names, `list` by default.
    """
    own = embedded_folder("target") / "chat_template.jinja"
    chat = models.tokenizer.chat_template
    embedded = bool(chat) and chat == own.read_text(encoding="utf-8")
    form = "auto" if skeleton is None else skeleton.format
    if skeleton is not None and skeleton.template != "auto":
        return skeleton.template
    if embedded and form != "list":
        return "embedded"
    return "instruct" if skeleton is None or form == "fields" else "list"
