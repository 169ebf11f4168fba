// How fast messages of a chunk's size move between two processes of this host: through raw sockets
// and through gRPC as the project uses it, over TCP and unix sockets, up, down and both ways at
// once.
//
//   wire_bench [--short] [--json FILE] [Google Benchmark's flags]
//
// The machine drifts, so all of them run in turn, several rounds, and ratios are taken within a
// round.
#include <benchmark/benchmark.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/system/heap_settings.h"
#include "tests/bench/figures.h"
#include "tests/bench/load/process_usage.h"
#include "tests/bench/wire/wire.h"
#include "tests/bench/wire/wire_peer.h"

namespace ballast::bench {
namespace {

struct Size {
  int rounds = 0;
  int64_t messages = 0;  // Of a transfer, in each direction that it has.
};
constexpr Size kFull = {.rounds = 7, .messages = 2048};
constexpr Size kShort = {.rounds = 3, .messages = 512};
constexpr Size kTiny = {.rounds = 1, .messages = 8};

struct Direction {
  const char* name;
  bool up;
  bool down;
};
constexpr Direction kDirections[] = {
    {"up", true, false}, {"down", false, true}, {"both", true, true}};

class WireBench {
 public:
  WireBench(const WirePeer& peer, Size size) : peer_(peer), size_(size) {}

  absl::Status Open() {
    const WirePeer::Addresses& to = peer_.addresses();
    BALLAST_ASSIGN_OR_RETURN(wires_["raw_tcp"], OpenRawWire(to.raw_tcp, memory_, 0));
    BALLAST_RETURN_IF_ERROR(ChooseRawUnix(to.raw_unix));
    BALLAST_ASSIGN_OR_RETURN(wires_["grpc_tcp"], OpenGrpcWire(to.grpc_tcp, memory_));
    BALLAST_ASSIGN_OR_RETURN(wires_["grpc_unix"], OpenGrpcWire(to.grpc_unix, memory_));
    return absl::OkStatus();
  }

  absl::Status Run() {
    for (const char* family : {"tcp", "unix"}) {
      for (const Direction& direction : kDirections) {
        Register(absl::StrCat("raw_", family), direction);
        Register(absl::StrCat("grpc_", family), direction);
      }
    }
    // One of our own: the library's is gone after the first run.
    benchmark::ConsoleReporter reporter;
    // The first round warms heaps, sockets and caches up.
    for (int round = 0; round <= size_.rounds && status_.ok(); ++round) {
      if (round == 1) samples_.clear();
      benchmark::RunSpecifiedBenchmarks(&reporter);
    }
    return status_;
  }

  Figures Report() const {
    Figures figures("wire");
    for (const auto& [name, samples] : samples_) {
      figures.Add(absl::StrCat(name, "_gb_s"), samples.gb_s, "GB/s each way");
      figures.Add(absl::StrCat(name, "_cpu_s_per_gb"), samples.cpu_s_per_gb, "CPU-s/GB");
      absl::string_view rest = name;
      if (!absl::ConsumePrefix(&rest, "grpc_")) continue;
      const auto raw = samples_.find(absl::StrCat("raw_", rest));
      if (raw == samples_.end()) continue;  // Filtered out.
      std::vector<double> ratios;
      for (size_t i = 0; i < samples.gb_s.size() && i < raw->second.gb_s.size(); ++i) {
        ratios.push_back(samples.gb_s[i] / raw->second.gb_s[i]);
      }
      figures.Add(absl::StrCat("grpc_to_raw_", rest), ratios, "ratio");
    }
    figures.info() = {{"message_bytes", kMessageBytes},
                      {"messages", size_.messages},
                      {"rounds", size_.rounds},
                      {"raw_unix_buffer_bytes", raw_unix_buffer_bytes_}};
    return figures;
  }

 private:
  // How fast a raw unix socket is depends on its buffers: the better of two sizes. The peer serves
  // one connection at a time, so each turn opens its own.
  absl::Status ChooseRawUnix(const std::string& address) {
    const int64_t messages = std::min<int64_t>(size_.messages, 256);
    double best_seconds = std::numeric_limits<double>::infinity();
    for (int turn = 0; turn < 4; ++turn) {
      for (const int bytes : {0, 1 << 20}) {
        BALLAST_ASSIGN_OR_RETURN(const auto wire, OpenRawWire(address, memory_, bytes));
        const auto begin = std::chrono::steady_clock::now();
        BALLAST_RETURN_IF_ERROR(wire->Transfer(messages, 0));
        BALLAST_RETURN_IF_ERROR(wire->Transfer(0, messages));
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
        if (turn == 0 || seconds.count() >= best_seconds) continue;  // The first warms up.
        best_seconds = seconds.count();
        raw_unix_buffer_bytes_ = bytes;
      }
    }
    BALLAST_ASSIGN_OR_RETURN(wires_["raw_unix"],
                             OpenRawWire(address, memory_, raw_unix_buffer_bytes_));
    return absl::OkStatus();
  }

  struct Samples {
    std::vector<double> gb_s;
    std::vector<double> cpu_s_per_gb;  // Of both processes.
  };

  void Register(const std::string& wire, const Direction& direction) {
    const std::string name = absl::StrCat(wire, "_", direction.name);
    benchmark::RegisterBenchmark(
        name.c_str(), [this, name, &wire = *wires_[wire], direction](
                          benchmark::State& state) { Measure(state, name, wire, direction); })
        ->Iterations(1)
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond);
  }

  void Measure(benchmark::State& state, const std::string& name, Wire& wire,
               const Direction& direction) {
    const int64_t up = direction.up ? size_.messages : 0;
    const int64_t down = direction.down ? size_.messages : 0;
    for (auto _ : state) {
      const absl::StatusOr<double> cpu_before = CpuSecondsOfBoth();
      const auto begin = std::chrono::steady_clock::now();
      const absl::Status moved = wire.Transfer(up, down);
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
      const absl::StatusOr<double> cpu_after = CpuSecondsOfBoth();
      status_.Update(moved);
      status_.Update(cpu_before.status());
      status_.Update(cpu_after.status());
      if (!status_.ok()) return state.SkipWithError(std::string(status_.message()).c_str());
      state.SetIterationTime(seconds.count());
      const double gb = 1e-9 * static_cast<double>(kMessageBytes);
      Samples& samples = samples_[name];
      samples.gb_s.push_back(gb * static_cast<double>(size_.messages) / seconds.count());
      samples.cpu_s_per_gb.push_back((*cpu_after - *cpu_before) /
                                     (gb * static_cast<double>(up + down)));
      state.counters["GB/s_each_way"] = samples.gb_s.back();
      state.counters["CPU-s/GB"] = samples.cpu_s_per_gb.back();
    }
  }

  absl::StatusOr<double> CpuSecondsOfBoth() const {
    BALLAST_ASSIGN_OR_RETURN(const double own, CpuSeconds(getpid()));
    BALLAST_ASSIGN_OR_RETURN(const double peer, CpuSeconds(peer_.pid()));
    return own + peer;
  }

  const WirePeer& peer_;
  const Size size_;
  const SendMemory memory_;
  int raw_unix_buffer_bytes_ = 0;
  std::map<std::string, std::unique_ptr<Wire>> wires_;
  std::map<std::string, Samples> samples_;
  absl::Status status_;
};

absl::Status RunWireBench(const WirePeer& peer, Size size, const std::string& json_path) {
  KeepHeapWarm();
  WireBench bench(peer, size);
  BALLAST_RETURN_IF_ERROR(bench.Open());
  BALLAST_RETURN_IF_ERROR(bench.Run());
  return json_path.empty() ? absl::OkStatus() : bench.Report().Write(json_path);
}

}  // namespace

}  // namespace ballast::bench

int main(int argc, char** argv) {
  namespace bench = ballast::bench;
  const auto peer = bench::WirePeer::Start();  // Forks: before anything else.
  benchmark::Initialize(&argc, argv);
  bench::Size size = bench::kFull;
  std::string json_path;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--short") {
      size = bench::kShort;
    } else if (word == "--tiny") {
      size = bench::kTiny;
    } else if (word == "--json" && i + 1 < argc) {
      json_path = argv[++i];
    } else {
      std::fprintf(stderr, "wire_bench: bad argument '%s'; expected --short, --tiny, --json FILE\n",
                   argv[i]);
      return 2;
    }
  }
  const absl::Status status =
      peer.ok() ? bench::RunWireBench(**peer, size, json_path) : peer.status();
  if (status.ok()) return 0;
  std::fprintf(stderr, "wire_bench: %s\n", std::string(status.message()).c_str());
  return 1;
}
