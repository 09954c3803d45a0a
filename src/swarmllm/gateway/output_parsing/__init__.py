"""What is thought, said and called in the text that a model writes.

readers     all of that together
reasoning   what a thinking model writes before its answer
tool_calls  calls of tools in answers
call_forms  how each family of models writes them
harmony     how gpt-oss writes all of that
"""
