from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StartCall(_message.Message):
    __slots__ = ("method", "request", "timeout_s", "metadata")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    METHOD_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    method: str
    request: bytes
    timeout_s: float
    metadata: _containers.ScalarMap[str, str]
    def __init__(self, method: _Optional[str] = ..., request: _Optional[bytes] = ..., timeout_s: _Optional[float] = ..., metadata: _Optional[_Mapping[str, str]] = ...) -> None: ...

class CallRequest(_message.Message):
    __slots__ = ("call", "start", "cancel", "received_nbytes")
    CALL_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_NBYTES_FIELD_NUMBER: _ClassVar[int]
    call: int
    start: StartCall
    cancel: bool
    received_nbytes: int
    def __init__(self, call: _Optional[int] = ..., start: _Optional[_Union[StartCall, _Mapping]] = ..., cancel: _Optional[bool] = ..., received_nbytes: _Optional[int] = ...) -> None: ...

class CallRequests(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[CallRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[CallRequest, _Mapping]]] = ...) -> None: ...

class CallEnd(_message.Message):
    __slots__ = ("code", "message", "metadata")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    metadata: _containers.ScalarMap[str, str]
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., metadata: _Optional[_Mapping[str, str]] = ...) -> None: ...

class CallAnswer(_message.Message):
    __slots__ = ("call", "messages", "end")
    CALL_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    call: int
    messages: _containers.RepeatedScalarFieldContainer[bytes]
    end: CallEnd
    def __init__(self, call: _Optional[int] = ..., messages: _Optional[_Iterable[bytes]] = ..., end: _Optional[_Union[CallEnd, _Mapping]] = ...) -> None: ...

class CallAnswers(_message.Message):
    __slots__ = ("answers",)
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[CallAnswer]
    def __init__(self, answers: _Optional[_Iterable[_Union[CallAnswer, _Mapping]]] = ...) -> None: ...
