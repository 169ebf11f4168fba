#include "gpu_worker/collective/gloo_collective.h"

#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <utility>
#include <vector>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast::worker {
namespace {

absl::Span<const std::byte> AsBytes(absl::Span<const float> values) {
  return {reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(float)};
}

// Without the place in Gloo's sources that it begins with.
std::string FirstLine(const std::string& reason) {
  const std::string line = reason.substr(0, reason.find('\n'));
  const size_t place_end = line.find("] ");
  return place_end == std::string::npos ? line : line.substr(place_end + 2);
}

class GlooCollective final : public Collective {
 public:
  GlooCollective(std::shared_ptr<gloo::rendezvous::Context> context,
                 std::chrono::milliseconds timeout)
      : context_(std::move(context)), timeout_(timeout), links_(context_->size) {
    for (int peer = 0; peer < context_->size; ++peer) {
      if (peer == context_->rank) continue;
      // The comment at `links_` says what this receive is for.
      links_[peer] = context_->createUnboundBuffer(nullptr, SIZE_MAX);
      links_[peer]->recv(peer, kSilentSlot, Address(&never_sent_), sizeof(never_sent_));
    }
  }

  // Closes the connections by destroying them: what was sent still arrives. Gloo's own
  // closeConnections resets them, and a last message that is not read yet is lost.
  ~GlooCollective() override = default;

  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

  int rank() const override { return context_->rank; }
  int world_size() const override { return context_->size; }

  absl::Status ReduceScatterSum(absl::Span<const float> input, absl::Span<float> shard) override {
    const size_t elements = shard.size();
    Check(input.size() == elements * world_size(), "input is one shard a rank");
    received_.resize(elements * world_size());
    std::vector<Transfer> transfers;
    for (int peer = 0; peer < world_size(); ++peer) {
      if (peer == rank()) continue;
      transfers.push_back(
          {.peer = peer,
           .send = AsBytes(input.subspan(peer * elements, elements)),
           .receive = {reinterpret_cast<std::byte*>(received_.data() + peer * elements),
                       elements * sizeof(float)}});
    }
    BALLAST_RETURN_IF_ERROR(Exchange("reduce-scatter", transfers));
    for (int peer = 0; peer < world_size(); ++peer) {
      // This rank's own part is added at its turn too, so that the order does not depend on the
      // rank.
      const float* addend = (peer == rank() ? input.data() : received_.data()) + peer * elements;
      if (peer == 0) {
        std::copy(addend, addend + elements, shard.begin());
      } else {
        for (size_t i = 0; i < elements; ++i) shard[i] += addend[i];
      }
    }
    return absl::OkStatus();
  }

  absl::Status AllGather(absl::Span<const std::byte> shard, absl::Span<std::byte> all) override {
    return Gather("all-gather", shard, all);
  }

  absl::Status AllReduceSum(absl::Span<double> values) override {
    // Each rank gets all values and adds them in the same order. The vectors are short, so this
    // costs little.
    std::vector<double> all(values.size() * world_size());
    BALLAST_RETURN_IF_ERROR(
        Gather("all-reduce",
               {reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(double)},
               {reinterpret_cast<std::byte*>(all.data()), all.size() * sizeof(double)}));
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = all[i];
      for (int peer = 1; peer < world_size(); ++peer) values[i] += all[peer * values.size() + i];
    }
    return absl::OkStatus();
  }

  absl::Status Broadcast(absl::Span<std::byte> bytes) override {
    std::vector<Transfer> transfers;
    if (rank() == 0) {
      for (int peer = 1; peer < world_size(); ++peer) {
        transfers.push_back({.peer = peer, .send = bytes, .receive = {}});
      }
    } else {
      transfers.push_back({.peer = 0, .send = {}, .receive = bytes});
    }
    return Exchange("broadcast", transfers);
  }

  absl::Status Barrier() override {
    std::vector<std::byte> all(world_size());
    const std::byte present{1};
    return Gather("barrier", {&present, 1}, absl::MakeSpan(all));
  }

 private:
  // What is sent to and received from one peer in one operation; empty: nothing.
  struct Transfer {
    int peer;
    absl::Span<const std::byte> send;
    absl::Span<std::byte> receive;
  };

  absl::Status Gather(const char* operation, absl::Span<const std::byte> shard,
                      absl::Span<std::byte> all) {
    const size_t bytes = shard.size();
    Check(all.size() == bytes * world_size(), "all is one shard a rank");
    absl::Span<std::byte> mine = all.subspan(rank() * bytes, bytes);
    if (mine.data() != shard.data()) std::copy(shard.begin(), shard.end(), mine.begin());
    std::vector<Transfer> transfers;
    for (int peer = 0; peer < world_size(); ++peer) {
      if (peer == rank()) continue;
      transfers.push_back(
          {.peer = peer, .send = shard, .receive = all.subspan(peer * bytes, bytes)});
    }
    return Exchange(operation, transfers);
  }

  // Starts all transfers and waits for them. An exception of Gloo becomes an error that names the
  // peer; `peer` is the one that the call in progress concerns.
  absl::Status Exchange(const char* operation, absl::Span<const Transfer> transfers) {
    if (!failed_.ok()) return failed_;
    // A rank that is ahead may already send its message of the next operation; the slot keeps them
    // apart.
    const uint64_t slot = next_slot_++;
    const auto deadline = std::chrono::steady_clock::now() + timeout_;
    int peer = rank();
    try {
      // All are started before the first wait: else two ranks could wait for each other.
      for (const Transfer& transfer : transfers) {
        peer = transfer.peer;
        Start(transfer, slot);
      }
      for (const Transfer& transfer : transfers) {
        peer = transfer.peer;
        gloo::transport::UnboundBuffer& link = *links_[peer];
        if (!transfer.receive.empty()) {
          Await("receiving", [&] { return link.waitRecv(Remaining(deadline)); });
        }
        if (!transfer.send.empty()) {
          Await("sending", [&] { return link.waitSend(Remaining(deadline)); });
        }
      }
    } catch (const std::exception& error) {
      failed_ = Failure(operation, peer, deadline, error.what());
      links_.clear();  // Nothing that still arrives is written to the caller's memory.
    }
    return failed_;
  }

  // A message, and right after it the end of a peer that has nothing more to do: a wait that wakes
  // up then sees the end. The next one returns the message at once, or throws again.
  template <typename Wait>
  static void Await(const char* what, const Wait& wait) {
    bool done;
    try {
      done = wait();
    } catch (const std::exception&) {
      done = wait();
    }
    if (!done) throw std::runtime_error(absl::StrCat(what, " was aborted"));
  }

  // Rounded up, so that a wait that ends for its time has reached the deadline; never negative,
  // which Gloo takes for its own default.
  static std::chrono::milliseconds Remaining(std::chrono::steady_clock::time_point deadline) {
    return std::max(std::chrono::milliseconds(0), std::chrono::ceil<std::chrono::milliseconds>(
                                                      deadline - std::chrono::steady_clock::now()));
  }

  void Start(const Transfer& transfer, uint64_t slot) {
    gloo::transport::UnboundBuffer& link = *links_[transfer.peer];
    if (!transfer.receive.empty()) {
      link.recv(transfer.peer, slot, Address(transfer.receive.data()), transfer.receive.size());
    }
    if (!transfer.send.empty()) {
      link.send(transfer.peer, slot, Address(transfer.send.data()), transfer.send.size());
    }
  }

  // A link's memory is the whole address space, so that an offset in it is an address.
  static size_t Address(const void* memory) { return reinterpret_cast<size_t>(memory); }

  absl::Status Failure(const char* operation, int peer,
                       std::chrono::steady_clock::time_point deadline, const char* reason) const {
    const bool late = std::chrono::steady_clock::now() >= deadline;
    const std::string what =
        late ? absl::StrCat("rank ", rank(), ": ", operation, ": waited ", timeout_.count(),
                            " ms for rank ", peer, "; see whether it still runs")
             : absl::StrCat("rank ", rank(), ": ", operation, ": lost rank ", peer,
                            "; see why it ended (", FirstLine(reason), ")");
    if (late) return absl::DeadlineExceededError(what);
    absl::Status lost = absl::UnavailableError(what);
    lost.SetPayload(kPeerLost, absl::Cord());
    return lost;
  }

  const std::shared_ptr<gloo::rendezvous::Context> context_;
  std::chrono::milliseconds timeout_;
  // By peer; null for this rank. When a connection ends, Gloo notifies the buffers that wait for a
  // message to begin, but not those in the middle of one. So each peer has one buffer for
  // everything, with a receive of something that is never sent on it: that is notified of every
  // end.
  std::vector<std::unique_ptr<gloo::transport::UnboundBuffer>> links_;
  std::byte never_sent_{};
  static constexpr uint64_t kSilentSlot = 0;
  uint64_t next_slot_ = kSilentSlot + 1;  // The same on all ranks: one for each operation.
  absl::Status failed_;
  std::vector<float> received_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Collective>> ConnectGloo(const GlooOptions& options,
                                                        gloo::rendezvous::Store& store) {
  try {
    gloo::transport::tcp::attr attributes(options.host.c_str());
    std::shared_ptr<gloo::transport::Device> device =
        gloo::transport::tcp::CreateDevice(attributes);
    auto context = std::make_shared<gloo::rendezvous::Context>(options.rank, options.world_size);
    context->setTimeout(options.connect_timeout);
    context->connectFullMesh(store, device);
    auto collective = std::make_unique<GlooCollective>(std::move(context), options.connect_timeout);
    // A rank that went on, and ended, while another still connects to it would look lost to it.
    BALLAST_RETURN_IF_ERROR(collective->Barrier());
    collective->set_timeout(options.timeout);
    return collective;
  } catch (const std::exception& error) {
    return absl::UnavailableError(absl::StrCat(
        "rank ", options.rank, ": connecting all workers failed: ", FirstLine(error.what()),
        "; start ", options.world_size, " workers"));
  }
}

}  // namespace ballast::worker
