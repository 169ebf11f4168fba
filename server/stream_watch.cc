#include "server/stream_watch.h"

#include <grpc/grpc.h>
#include <grpc/support/alloc.h>
#include <spdlog/spdlog.h>

#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "server/listener.h"

namespace ballast::server {
namespace {

constexpr intptr_t kMostAtOnce = 256;
// A socket's name is "chttp2 ipv4:127.0.0.1:50051".
constexpr absl::string_view kNamePrefix = "chttp2 ";

// What gRPC says in JSON; it has to be given back.
std::string Taken(char* json) {
  if (json == nullptr) return "";
  std::string text(json);
  gpr_free(json);
  return text;
}

// The VALUEs of all `"key":"VALUE"`.
std::vector<std::string> ValuesOf(const std::string& json, absl::string_view key) {
  // gRPC's JSON is that of Protobuf (grpc/grpc.h), in which 64-bit numbers are strings; it has no
  // spaces.
  const std::string begin = absl::StrCat("\"", key, "\":\"");
  std::vector<std::string> values;
  for (size_t at = json.find(begin); at != std::string::npos; at = json.find(begin, at)) {
    at += begin.size();
    values.push_back(json.substr(at, json.find('"', at) - at));
  }
  return values;
}

int64_t NumberOf(const std::string& json, absl::string_view key) {
  // A counter that is 0 is left out.
  const std::vector<std::string> values = ValuesOf(json, key);
  int64_t number = 0;
  return !values.empty() && absl::SimpleAtoi(values.front(), &number) ? number : 0;
}

}  // namespace

StreamWatch::StreamWatch()
    : StreamWatch([](const std::string& peer) { CloseConnectionsOf(peer); },
                  [](const std::string& line) { spdlog::warn("{}", line); }) {}

void StreamWatch::Look() {
  for (const std::string& server : ValuesOf(Taken(grpc_channelz_get_servers(0)), "serverId")) {
    int64_t number = 0;
    if (absl::SimpleAtoi(server, &number)) LookAt(static_cast<intptr_t>(number));
  }
}

void StreamWatch::LookAt(intptr_t server) {
  intptr_t& next = next_[server];
  const std::vector<std::string> sockets =
      ValuesOf(Taken(grpc_channelz_get_server_sockets(server, next, kMostAtOnce)), "socketId");
  // Behind a page that is full there may be more, and the next look goes on there. Behind the last
  // page it begins at the front again.
  next = 0;
  for (const std::string& socket : sockets) {
    int64_t number = 0;
    if (!absl::SimpleAtoi(socket, &number)) continue;
    if (sockets.size() == static_cast<size_t>(kMostAtOnce)) next = number + 1;
    const std::string facts = Taken(grpc_channelz_get_socket(static_cast<intptr_t>(number)));
    const int64_t open = NumberOf(facts, "streamsStarted") - NumberOf(facts, "streamsSucceeded") -
                         NumberOf(facts, "streamsFailed");
    const std::vector<std::string> names = ValuesOf(facts, "name");
    if (open <= kMost || names.empty()) continue;
    const std::string peer(absl::StripPrefix(names.front(), kNamePrefix));
    if (!absl::StartsWith(peer, "ipv4:") && !absl::StartsWith(peer, "ipv6:")) continue;
    close_(peer);
    // gRPC may take a while to work off what it has read of it.
    closings_.Happened([&](int64_t closed) {
      return absl::StrCat("closed ", closed, " connections, the last of ", peer, ", which had ",
                          open, " streams, of ", kMaxStreamsOfConnection,
                          " at most; see to what that client does");
    });
  }
}

}  // namespace ballast::server
