"""The Lua scripts of ``store.redis``. Each runs atomically in Redis.

Entries, records and leases are stored as ``NUMBER BYTES``: version and value, number and value, token and owner. Numbers
are below 2**53, so that Lua's floats are exact. A script that writes answers ``{OUTCOME, NUMBER}``.
"""

FOREIGN = "TRIPTYCHFOREIGN"
"""Mark in the error of a script that found something it cannot read."""

_NUMBER_OF = f"""
local function number_of(raw)
  local number = string.match(raw, '^(%d+) ')
  if not number then error('{FOREIGN}') end
  return number
end
"""

_NEXT = f"""
local function next_revision(key)
  local last = tonumber(redis.call('GET', key) or '0')
  if not last then error('{FOREIGN}') end
  local time = redis.call('TIME')
  local revision = string.format('%.0f', math.max(last + 1, time[1] * 1000000 + time[2]))
  redis.call('SET', key, revision)
  return revision
end
"""

_HELD = """
local function held(lease, token)
  local raw = redis.call('GET', lease)
  return raw and number_of(raw) == token
end
"""

_CHANGES = (
    _NUMBER_OF
    + _NEXT
    + _HELD
    + """
local table, changed, revision, lease = unpack(KEYS)
local key, expected, token = ARGV[1], ARGV[2], ARGV[3]
if token ~= '' and not held(lease, token) then return {'deposed', token} end
local raw = redis.call('HGET', table, key)
local version = raw and number_of(raw) or '0'
if expected ~= '' and expected ~= version then return {'conflict', version} end
"""
)

PUT = (
    _CHANGES
    + """
if not raw then
  local entries = redis.call('HLEN', table)
  if entries >= tonumber(ARGV[5]) then return {'full', tostring(entries)} end
end
local now = next_revision(revision)
redis.call('HSET', table, key, now .. ' ' .. ARGV[4])
redis.call('SET', changed, now)
return {'done', now}
"""
)

DELETE = (
    _CHANGES
    + """
if not raw then return {'done', '0'} end
local now = next_revision(revision)
redis.call('HDEL', table, key)
redis.call('SET', changed, now)
return {'done', now}
"""
)

GET = "return redis.call('HGET', KEYS[1], ARGV[1])"

LIST = "return {redis.call('GET', KEYS[2]) or '', redis.call('HGETALL', KEYS[1])}"

REVISION = "return redis.call('GET', KEYS[1]) or ''"

APPEND = (
    _NUMBER_OF
    + _NEXT
    + _HELD
    + """
local log, revision, lease = unpack(KEYS)
local value, keep, token = unpack(ARGV)
if token ~= '' and not held(lease, token) then return {'deposed', token} end
local now = next_revision(revision)
redis.call('RPUSH', log, now .. ' ' .. value)
redis.call('LTRIM', log, -keep, -1)
return {'done', now}
"""
)

TAIL = "return redis.call('LRANGE', KEYS[1], -ARGV[1], -1)"

ACQUIRE = (
    _NUMBER_OF
    + _NEXT
    + """
local lease, revision = unpack(KEYS)
local owner, ttl_ms = unpack(ARGV)
local raw = redis.call('GET', lease)
if raw and raw ~= number_of(raw) .. ' ' .. owner then
  -- Redis ends keys by its wall clock: after a step back this one would stay for as long as the step.
  local longest_ms = redis.call('GET', lease .. ':ttl')
  if longest_ms and redis.call('PTTL', lease) > tonumber(longest_ms) then redis.call('PEXPIRE', lease, longest_ms) end
  return false
end
local token = next_revision(revision)
redis.call('SET', lease, token .. ' ' .. owner, 'PX', ttl_ms)
redis.call('SET', lease .. ':ttl', ttl_ms)
return token
"""
)

RENEW = (
    _NUMBER_OF
    + _HELD
    + """
if not held(KEYS[1], ARGV[1]) then return 0 end
redis.call('SET', KEYS[1] .. ':ttl', ARGV[2])
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""
)

RELEASE = (
    _NUMBER_OF
    + _HELD
    + """
if not held(KEYS[1], ARGV[1]) then return 0 end
return redis.call('DEL', KEYS[1])
"""
)

HOLDER = "return redis.call('GET', KEYS[1])"

ALL = (PUT, DELETE, GET, LIST, REVISION, APPEND, TAIL, ACQUIRE, RENEW, RELEASE, HOLDER)
