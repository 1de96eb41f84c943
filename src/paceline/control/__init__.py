"""The control plane: small frames that ride beside the data, so that ranks agree before they add.

    post(topic, frame)      hand this rank's frame to every rank; does not wait
    collect(topic)          wait for everybody's frame of that topic, in rank order

Every rank posts the same topics. Ranks of one machine write into memory that the others read, with sockets
beside it that show a dead peer at once; ranks of several machines are wired by TCP. Very many of them, or
those that cannot reach each other directly, use a group that moves CPU tensors.
Frames are bytes that the reader unpacks field by field: nothing that came from a peer is ever unpickled.
"""

from paceline.control.base import Control, SoloControl
from paceline.control.group import GroupControl
from paceline.control.mailbox import MailboxControl
from paceline.control.sockets import SocketControl
from paceline.control.tcp import TcpControl
from paceline.control.wiring import control_over

__all__ = [
    "Control",
    "GroupControl",
    "MailboxControl",
    "SocketControl",
    "SoloControl",
    "TcpControl",
    "control_over",
]
