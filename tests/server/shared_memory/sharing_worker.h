// A worker whose gradients and weights lie in memory that it shares with the service.
#ifndef BALLAST_TESTS_SERVER_SHARED_MEMORY_SHARING_WORKER_H_
#define BALLAST_TESTS_SERVER_SHARED_MEMORY_SHARING_WORKER_H_

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/rank_memory_layout.h"
#include "tests/server/shared_memory/shared_memory_peer.h"
#include "tests/server/tiny_job.h"

namespace ballast::server {

class SharingWorker : public TestWorker {
 public:
  SharingWorker(ServiceForTests& service, const std::string& job, int rank,
                std::string process_id = "p")
      : TestWorker(service, job, rank, Codec::kFrames, std::move(process_id)), job_(job) {
    AskForSharedMemory();
  }

  // Attaches and fetches the memory. Weights will be read there.
  void Join() {
    ASSERT_TRUE(Attach().ok());
    ASSERT_TRUE(attachment().has_shared_memory());
    const std::shared_ptr<Job> job = service().engine().FindJob(job_).value();
    places_ = std::make_unique<RankMemoryLayout>(job->layout(), job->spec().groups, rank());
    peer_ = std::make_unique<SharedMemoryPeer>(attachment().shared_memory().socket());
    ASSERT_TRUE(peer_->Say(attachment().shared_memory().token()));
    ASSERT_EQ(peer_->Reply(), "G");
    ASSERT_EQ(peer_->memory_bytes(), places_->size_bytes());
    ExpectWeightsInSharedMemory();
  }
  void JoinAndOpenStream() {
    Join();
    OpenStream();
  }

  absl::Span<std::byte> memory() { return peer_->memory(); }
  absl::Span<std::byte> gradient(int chunk) { return At(places_->gradient(chunk)); }
  std::string weights_there(int chunk) {
    const absl::Span<std::byte> place = At(places_->weights(chunk));
    return std::string(reinterpret_cast<const char*>(place.data()), place.size());
  }
  // All that may be written without breaking the rule that padding is zero.
  std::vector<absl::Span<std::byte>> used_places() {
    std::vector<absl::Span<std::byte>> places;
    for (const int chunk : chunks()) {
      places.push_back(gradient(chunk).first(2 * UsedElements(chunk)));
      places.push_back(At(places_->weights(chunk)));
    }
    return places;
  }
  void LetGo() { peer_->Close(); }  // Gives up the memory; its mapping stays.

  // All elements of the chunk, padding excepted.
  void Fill(int chunk, float value) {
    const std::string payload = Payload(chunk, value);
    std::memcpy(gradient(chunk).data(), payload.data(), payload.size());
  }
  // This rank's, as messages number them.
  std::vector<int> AllOnWire() const {
    std::vector<int> all;
    for (const int chunk : chunks()) all.push_back(OnWire(chunk));
    return all;
  }
  static v1::TrainRequest SharedGradients(uint64_t step, const std::vector<int>& chunks,
                                          uint32_t micro_step, bool final) {
    v1::TrainRequest request;
    v1::SharedGradients& shared = *request.mutable_shared_gradients();
    shared.set_step(step);
    shared.set_micro_step_begin(micro_step);
    shared.set_micro_step_end(micro_step + 1);
    shared.set_final(final);
    shared.mutable_chunks()->Add(chunks.begin(), chunks.end());
    return request;
  }

  // What SendStep of tiny_job.h sends as payloads, seal included.
  void SendStepInPlace(uint64_t step, uint32_t micro_steps) {
    Begin(step);
    for (uint32_t micro_step = 0; micro_step < micro_steps; ++micro_step) {
      if (micro_step > 0) ReadUntilAcknowledged();  // The places are ours again.
      for (const int chunk : chunks()) Fill(chunk, 0.25f * (chunk + 1) + micro_step);
      Send(SharedGradients(step, AllOnWire(), micro_step, /*final=*/micro_step + 1 == micro_steps));
      EndMicroStep(step, micro_step);
    }
    Seal(step, micro_steps);
  }

  // The weights of an applied step by chunk, from where they lie; empty if it was skipped.
  std::map<int, std::string> ReadStepInPlace() {
    std::map<int, std::string> weights;
    std::vector<int> announced;
    bool applied = false;
    while (true) {
      const v1::TrainResponse message = Next();
      if (message.kind_case() == v1::TrainResponse::KIND_NOT_SET) return {};
      if (message.has_seal_refused()) {
        ADD_FAILURE() << message.seal_refused().message();
        return {};
      }
      EXPECT_FALSE(message.has_weights()) << "sent, though it could be seen";
      if (message.has_decision()) applied = message.decision().applied();
      for (const uint32_t chunk : message.decision().dropped_chunks()) {
        std::erase(announced, static_cast<int>(chunk));
      }
      const auto& chunks = message.shared_weights().chunks();
      announced.insert(announced.end(), chunks.begin(), chunks.end());
      if (message.has_committed()) break;
    }
    if (!applied) return {};
    for (const int chunk : announced) {
      EXPECT_TRUE(weights.emplace(chunks()[chunk], weights_there(chunks()[chunk])).second)
          << "announced twice: " << chunk;
    }
    return weights;
  }

 private:
  absl::Span<std::byte> At(const RankMemoryLayout::Place& place) {
    return memory().subspan(place.offset_bytes, place.bytes);
  }

  const std::string job_;
  std::unique_ptr<RankMemoryLayout> places_;
  std::unique_ptr<SharedMemoryPeer> peer_;
};

}  // namespace ballast::server

#endif  // BALLAST_TESTS_SERVER_SHARED_MEMORY_SHARING_WORKER_H_
