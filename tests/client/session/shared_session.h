// A scripted session that shares memory with the test.
#ifndef BALLAST_TESTS_CLIENT_SESSION_SHARED_SESSION_H_
#define BALLAST_TESTS_CLIENT_SESSION_SHARED_SESSION_H_

#include <string>
#include <vector>

#include "tests/client/session/scripted_session.h"
#include "tests/client/shared_memory_server_for_tests.h"

namespace ballast::client {

class SharedSession : public ScriptedSession {
 protected:
  SharedSession() {
    *fake_->attachment.mutable_shared_memory() = server_.offer();
    options_.weights = nullptr;
    options_.on_weights = [this](int chunk) { complete_.push_back(chunk); };
  }
  ~SharedSession() override { session_.reset(); }  // Before the server, which waits for it.

  void SendSharedWeights(uint64_t step, const std::vector<uint32_t>& chunks,
                         bool provisional = false) {
    v1::TrainResponse response;
    v1::SharedWeights& weights = *response.mutable_shared_weights();
    weights.set_step(step);
    weights.set_provisional(provisional);
    weights.mutable_chunks()->Add(chunks.begin(), chunks.end());
    fake_->Deliver(response);
  }
  std::string WeightsInPlace(int chunk) const {
    const absl::Span<const std::byte> weights = session_->weights_memory(chunk);
    return {reinterpret_cast<const char*>(weights.data()), weights.size()};
  }

  static RankMemoryLayout Places() {
    const JobSpec job = SmallJob("gpt", 1);
    return {Layout::Create(job.layout).value(), job.groups, 0};
  }

  MemoryFile file_{Places()};
  SharedMemoryServerForTests server_{
      [this](int connection) { Hand(connection, "G", {file_.file()}); }};
  std::vector<int> complete_;  // Chunks, in the order of on_weights.
};

}  // namespace ballast::client

#endif  // BALLAST_TESTS_CLIENT_SESSION_SHARED_SESSION_H_
