-- Ends every request that takes longer than DEADLINE_S, whatever trickles meanwhile: HAProxy's timeouts begin anew with each
-- byte. A piece of 5 MiB in this time is 43 kB/s.
-- Once a minute it says which addresses had requests refused as beyond their share, and of which the log has no lines.
local DEADLINE_S, EVERY_S = 120, 5
local TELL_S = 60
local OFTEN = 600
local SOCKET = "/tmp/gateway.sock"
local SECONDS = { s = 1, m = 60, h = 3600, d = 86400 }

local function ask(command)
  local link = core.tcp()
  link:settimeout(5)
  if not link:connect(SOCKET) then return "" end
  link:send(command .. "\n")
  local answer = link:receive("*a")
  link:close()
  return answer or ""
end

local function age(text)
  local sum = 0
  for number, unit in text:gmatch("(%d+)([smhd])") do sum = sum + tonumber(number) * SECONDS[unit] end
  return sum
end

core.register_task(function()
  while true do
    core.sleep(EVERY_S)
    for line in ask("show sess"):gmatch("[^\n]+") do
      local id, took = line:match("^(0x%x+): .- fe=fleet .- age=(%S+)")
      if id and age(took) > DEADLINE_S then
        ask("shutdown session " .. id)
        core.Warning("deadline: " .. (line:match("src=(%S+)") or "?") .. " cut after " .. took)
      end
    end
  end
end)

core.register_task(function()
  while true do
    core.sleep(TELL_S)
    for name, whose in pairs({ calling = "", strangers = "strangers at " }) do
      for line in ask("show table " .. name .. " data.gpc0 gt 0"):gmatch("[^\n]+") do
        local address, refused = line:match("key=(%S+).- gpc0=(%d+)")
        if address then
          ask("set table " .. name .. " key " .. address .. " data.gpc0 0")
          core.Warning("share: " .. refused .. " requests of " .. whose .. address .. " refused, beyond its share")
        end
      end
    end
    for line in ask("show table fleet data.http_req_rate gt " .. OFTEN):gmatch("[^\n]+") do
      local address, rate = line:match("key=(%S+).- http_req_rate%(%d+%)=(%d+)")
      if address then
        core.Warning("often: " .. rate .. " requests of " .. address .. " in ten seconds; they are not in the log")
      end
    end
  end
end)
