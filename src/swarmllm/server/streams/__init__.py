"""What peers ask of this server.

handler           a stream is greeted, and served until it ends
dispatcher        its messages, taken in order, answered or refused
session_messages  what it says to sessions
batch_request     a batch that it asks for
stack_parts       the blocks of each stack of the model
input_checks      whether tensors are what their header says
access            what is served at the moment, and to whom
serving           all that the server has for the blocks that it serves now
"""
