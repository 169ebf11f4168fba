// Which of gRPC's server APIs moves messages of a chunk's size best: callback, which server/ uses,
// completion queue, or sync. Each end sends and receives at once on one stream, through ByteBuffers
// on memory of its own, with the project's settings; the client's end is the same for all three.
//
//   wire_apis [--short] [--json FILE]
//
// The rule: server/ keeps the callback API as long as it is within 5% of the best. The APIs take
// turns, since the machine drifts, and ratios are taken within a round.
#include <grpcpp/channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/connect.h"
#include "client/session.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/heap_settings.h"
#include "tests/bench/figures.h"
#include "tests/bench/load/process_usage.h"
#include "tests/bench/wire/wire.h"
#include "tests/bench/wire/wire_apis_servers.h"

namespace ballast::bench {
namespace {

// Sends and receives `messages` at once on a stream of its own.
absl::Status Exchange(const std::shared_ptr<grpc::Channel>& channel, const SendMemory& memory,
                      int64_t messages) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(kWireLimitSeconds));
  grpc::CompletionQueue queue;
  const auto stream = stub.PrepareCall(&context, kExchangeMethod, &queue);
  grpc::ByteBuffer incoming;
  grpc::Status status;
  int64_t sent = 0, received = 0;
  int under_way = 1;  // Operations.
  Tag begun, written, read, ended;
  const auto read_next = [&] {
    ++under_way;
    stream->Read(&incoming, &read);
  };
  begun = [&](bool ok) {
    if (ok) written(true);
    read_next();
  };
  written = [&](bool ok) {
    if (!ok) return;
    ++under_way;
    if (sent == messages) return stream->WritesDone(&ended);
    stream->Write(MessageAt(memory, sent++), &written);
  };
  read = [&](bool ok) {
    if (ok && Consume(incoming)) {
      ++received;
      return read_next();
    }
    ++under_way;
    stream->Finish(&status, &ended);
  };
  ended = [](bool) {};
  stream->StartCall(&begun);
  void* tag = nullptr;
  bool ok = false;
  while (under_way > 0 && queue.Next(&tag, &ok)) {
    --under_way;
    (*static_cast<Tag*>(tag))(ok);
  }
  queue.Shutdown();
  while (queue.Next(&tag, &ok)) continue;
  if (!status.ok() || received != messages) {
    return absl::UnavailableError(
        absl::StrCat(received, " of ", messages, " messages came back: ", status.error_message()));
  }
  return absl::OkStatus();
}

struct Sample {
  double gb_s = 0;      // Each way.
  double cpu_s_gb = 0;  // Of both processes, for each GB that went either way.
};

absl::StatusOr<double> CpuSecondsOfBoth(pid_t servers) {
  BALLAST_ASSIGN_OR_RETURN(const double there, CpuSeconds(servers));
  BALLAST_ASSIGN_OR_RETURN(const double here, CpuSeconds(getpid()));
  return there + here;
}

absl::StatusOr<Sample> Measure(const std::shared_ptr<grpc::Channel>& channel,
                               const SendMemory& memory, int64_t messages, pid_t servers) {
  BALLAST_ASSIGN_OR_RETURN(const double cpu_before, CpuSecondsOfBoth(servers));
  const auto begin = std::chrono::steady_clock::now();
  BALLAST_RETURN_IF_ERROR(Exchange(channel, memory, messages));
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  BALLAST_ASSIGN_OR_RETURN(const double cpu_after, CpuSecondsOfBoth(servers));
  const double gb = 1e-9 * static_cast<double>(messages * kMessageBytes);
  return Sample{.gb_s = gb / seconds.count(), .cpu_s_gb = (cpu_after - cpu_before) / (2 * gb)};
}

struct Size {
  int rounds = 0;
  int64_t messages = 0;
};
constexpr Size kFull = {.rounds = 9, .messages = 2048};
constexpr Size kShort = {.rounds = 1, .messages = 8};

absl::Status Run(const Size& size, const std::string& json_path) {
  ExchangeServers servers;
  BALLAST_RETURN_IF_ERROR(servers.Start());
  KeepHeapWarm();
  const SendMemory memory;
  std::map<std::string, std::shared_ptr<grpc::Channel>> channels;
  std::map<std::string, std::vector<double>> samples;
  // The first round warms heaps, sockets and caches up.
  for (int round = 0; round <= size.rounds; ++round) {
    for (size_t family = 0; family < std::size(kFamilies); ++family) {
      std::map<std::string, double> gb_s;
      for (size_t api = 0; api < std::size(kApis); ++api) {
        const std::string& address = servers.address(api, family);
        if (channels[address] == nullptr) {
          BALLAST_ASSIGN_OR_RETURN(channels[address], client::Connect(address));
        }
        BALLAST_ASSIGN_OR_RETURN(const Sample sample,
                                 Measure(channels[address], memory, size.messages, servers.pid()));
        gb_s[kApis[api]] = sample.gb_s;
        if (round == 0) continue;
        const std::string name = absl::StrCat(kApis[api], "_", kFamilies[family]);
        samples[name + "_gb_s"].push_back(sample.gb_s);
        samples[name + "_cpu_s_gb"].push_back(sample.cpu_s_gb);
      }
      if (round == 0) continue;
      const double best = std::max({gb_s["callback"], gb_s["completion_queue"], gb_s["sync"]});
      samples[absl::StrCat("callback_to_best_", kFamilies[family])].push_back(gb_s["callback"] /
                                                                              best);
    }
  }
  Figures figures("wire_apis");
  for (const auto& [name, values] : samples) {
    std::printf("%-32s %.3f\n", name.c_str(), Median(values));
    figures.Add(name, values, absl::EndsWith(name, "_gb_s") ? "GB/s each way" : "");
  }
  return json_path.empty() ? absl::OkStatus() : figures.Write(json_path);
}

int Main(int argc, char** argv) {
  Size size = kFull;
  std::string json_path;
  for (int i = 1; i < argc; ++i) {
    absl::string_view argument = argv[i];
    if (argument == "--short") {
      size = kShort;
    } else if (argument == "--json" && i + 1 < argc) {
      json_path = argv[++i];
    } else {
      std::fprintf(stderr, "usage: wire_apis [--short] [--json FILE]\n");
      return 2;
    }
  }
  const absl::Status status = Run(size, json_path);
  if (!status.ok()) std::fprintf(stderr, "wire_apis: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace ballast::bench

int main(int argc, char** argv) { return ballast::bench::Main(argc, argv); }
