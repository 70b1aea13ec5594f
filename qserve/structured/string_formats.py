"""Patterns for formats of JSON strings whose length or range llguidance does not limit."""

# Years are 0001 to 9999. 29 February exists only in leap years.
_YEAR = r"(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_OF_4 = r"(?:0[48]|[2468][048]|[13579][26])"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|"
    r"(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|"
    rf"(?:[0-9]{{2}}{_OF_4}|{_OF_4}00)-02-29)"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?"
    r"(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
# Durations of RFC 3339, with numbers of at most nine digits.
_N = "[0-9]{1,9}"
_CLOCK = rf"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_DAYS = rf"(?:{_N}D|{_N}M(?:{_N}D)?|{_N}Y(?:{_N}M(?:{_N}D)?)?)"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_PLAIN = "[A-Za-z0-9_+-]+"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_EMAIL_LENGTH = "^[^@]{1,64}@[^@]{1,189}$"

# Format -> patterns, which must all match.
PATTERNS: dict[str, tuple[str, ...]] = {
    "date": (f"^{_DATE}$",),
    "date-time": (f"^{_DATE}[Tt]{_TIME}$",),
    "time": (f"^{_TIME}$",),
    "duration": (f"^P(?:{_DAYS}(?:{_CLOCK})?|{_CLOCK}|{_N}W)$",),
    "email": (
        rf"^{_ATOM}(?:\.{_ATOM})*@(?:{_LABEL}\.)+[A-Za-z]{{2,24}}$",
        _EMAIL_LENGTH,
    ),
    "json-pointer": (r"^(?:/(?:[^~/]|~[01])*)*$",),
    "base64": (r"^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",),
    "base64url": ("^[A-Za-z0-9_-]*$",),
}
EMAIL = "email"
# E-mail addresses with only letters, digits and _ + -: without limits of length, and with them.
PLAIN_EMAIL = (
    rf"^{_PLAIN}(?:\.{_PLAIN})*@(?:[A-Za-z0-9][A-Za-z0-9-]*\.)+[A-Za-z]{{2,}}$",
    (
        rf"^{_PLAIN}(?:\.{_PLAIN})*@(?:{_LABEL}\.)+[A-Za-z]{{2,24}}$",
        _EMAIL_LENGTH,
    ),
)
# Formats that llguidance implements.
OTHERS_OF_LIBRARY = frozenset({"hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"})
# Formats that do not restrict the text: annotations of OpenAPI and pydantic.
UNCHECKED = frozenset(
    {"int32", "int64", "float", "double", "password", "binary", "byte", "path", "file-path"}
)
