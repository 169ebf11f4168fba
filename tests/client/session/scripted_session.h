// A session over a fake transport, with verbs for the service's messages.
#ifndef BALLAST_TESTS_CLIENT_SESSION_SCRIPTED_SESSION_H_
#define BALLAST_TESTS_CLIENT_SESSION_SCRIPTED_SESSION_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/session/session_impl.h"
#include "proto/convert.h"
#include "tests/client/job_for_tests.h"
#include "tests/client/session/fake_transport.h"

namespace ballast::client {

// A session of the small job's one rank, which is at step 4, and a service whose messages come from
// the test.
class ScriptedSession : public testing::Test {
 protected:
  ScriptedSession() {
    auto transport = std::make_unique<FakeTransport>();
    fake_ = transport.get();
    transport_ = std::move(transport);
    fake_->attachment.set_uid("u");
    *fake_->attachment.mutable_generation() = proto::ToProto(Generation(3));
    fake_->attachment.set_committed_step(4);
    options_.job = SmallJob("gpt", 1);
    options_.weights = [this](int chunk) {
      std::string& memory = memory_[chunk];
      memory.resize(chunk == 4 ? 1024 : 512);
      return absl::MakeSpan(reinterpret_cast<std::byte*>(memory.data()), memory.size());
    };
    options_.window_bytes = 1024;
  }

  absl::Status Open() {
    auto session = SessionImpl::Open(std::move(transport_), clock_, options_);
    if (!session.ok()) return session.status();
    session_ = *std::move(session);
    return absl::OkStatus();
  }
  void OpenAndBegin() {
    ASSERT_TRUE(Open().ok());
    ASSERT_TRUE(session_->BeginStep({}).ok());
  }
  absl::Status PushChunk(int chunk, std::function<void()> released = nullptr) {
    GradientPush push;
    push.chunk = chunk;
    push.payload = absl::MakeConstSpan(gradient_).subspan(0, chunk == 4 ? 1024 : 512);
    push.released = std::move(released);
    return session_->Push(std::move(push));
  }
  void Acknowledge(uint64_t messages) {
    v1::TrainResponse response;
    response.mutable_acknowledged()->set_messages(messages);
    fake_->Deliver(response);
  }
  void Decide(uint64_t step, bool applied) {
    v1::TrainResponse response;
    response.mutable_decision()->set_step(step);
    response.mutable_decision()->set_applied(applied);
    response.mutable_decision()->set_norm(2.5);
    response.mutable_decision()->set_skip_reason(applied ? "" : "wte is not finite");
    fake_->Deliver(response);
  }
  void SendWeights(uint64_t step, int chunk, const std::vector<std::string>& pieces) {
    v1::TrainResponse response;
    response.mutable_weights()->mutable_header()->set_step(step);
    response.mutable_weights()->mutable_header()->set_chunk(static_cast<uint32_t>(chunk));
    fake_->Deliver(response, pieces);
  }
  void Commit(uint64_t step) {
    v1::TrainResponse response;
    response.mutable_committed()->set_step(step);
    response.mutable_committed()->set_update_seconds(0.25);
    fake_->Deliver(response);
  }
  void TellDiscarded(uint64_t step, uint32_t attempt) {
    v1::TrainResponse response;
    response.mutable_discarded()->set_step(step);
    response.mutable_discarded()->set_attempt(attempt);
    fake_->Deliver(response);
  }
  void Refuse(uint64_t step, const std::string& message, uint32_t attempt = 0) {
    v1::TrainResponse response;
    response.mutable_seal_refused()->set_attempt(attempt);
    response.mutable_seal_refused()->set_step(step);
    response.mutable_seal_refused()->set_message(message);
    fake_->Deliver(response);
  }

  // The step's weights of a chunk: all the same letter.
  static std::string WeightsOf(int chunk) {
    return std::string(chunk == 4 ? 1024 : 512, static_cast<char>('a' + chunk));
  }

  std::unique_ptr<Transport> transport_;
  FakeTransport* fake_;
  FakeClock clock_;
  SessionOptions options_;
  std::map<int, std::string> memory_;
  std::vector<std::byte> gradient_ = std::vector<std::byte>(1024);
  std::unique_ptr<SessionImpl> session_;
};

}  // namespace ballast::client

#endif  // BALLAST_TESTS_CLIENT_SESSION_SCRIPTED_SESSION_H_
