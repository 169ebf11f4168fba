// A service in a few lines, for one rank of a job: it keeps the ledger, decides at the seal, and
// commits. Its streams break where the test wants, in either direction. It records every
// contribution that it accepted, with its values. It may share memory with its worker.
#ifndef BALLAST_TESTS_CLIENT_MODEL_SERVICE_H_
#define BALLAST_TESTS_CLIENT_MODEL_SERVICE_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/transport/train_call.h"
#include "client/transport/transport.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "tests/client/session/fake_transport.h"
#include "tests/client/session/message_name.h"
#include "tests/client/shared_memory_server_for_tests.h"

namespace ballast::client {

// Where a stream breaks. Messages are counted in this stream, without the open message and Opened.
struct BreakPoint {
  static constexpr size_t kNever = ~size_t{0};
  size_t up = kNever;     // At this message to the service, from 1.
  bool accepted = false;  // The service accepts that message.
  bool acked = false;     // The service acknowledges it, too.
  int chunks = 0;         // The service accepts only these many of its shared gradients.
  size_t down = kNever;   // Before this message of the service, from 1, without acknowledgements.
};

// The state that the transport and the streams share.
class ModelService {
 public:
  // `weight_bytes`: by chunk. Acknowledges after each `ack_every` messages.
  ModelService(std::vector<size_t> weight_bytes, size_t ack_every)
      : weight_bytes_(std::move(weight_bytes)),
        ack_every_(ack_every),
        next_(weight_bytes_.size(), 0) {}

  // The weights of a chunk after a step, different for each chunk and step.
  std::string Weights(uint64_t step, int chunk) const {
    return std::string(weight_bytes_[chunk], static_cast<char>(' ' + step * 10 + chunk));
  }

  // The values of a gradient, as the test pushes them and the service expects them.
  std::string Gradient(uint64_t step, int chunk, uint32_t micro_step) const {
    return std::string(weight_bytes_[chunk],
                       static_cast<char>('0' + step * 20 + chunk * 3 + micro_step));
  }

  // ---- what the test sets
  MemoryFile* memory = nullptr;    // Shared with the worker by `offer`.
  v1::SharedMemoryOffer offer;     // If there is memory.
  std::vector<BreakPoint> breaks;  // For the first streams; later ones do not break.
  bool applies = true;             // Its decision.
  bool merges = false;  // Streams send consecutive shared gradients in one message, once another
                        // message follows.

  // ---- what the test sees
  std::vector<std::string> taken() const {  // Every message that changed the state, in words.
    MutexLock lock(mutex_);
    return taken_;
  }
  std::vector<std::string> repeats() const {  // Every gradient that had arrived before.
    MutexLock lock(mutex_);
    return repeats_;
  }
  size_t streams() const {
    MutexLock lock(mutex_);
    return streams_;
  }
  size_t shared() const {  // Gradients that arrived through shared memory.
    MutexLock lock(mutex_);
    return shared_;
  }

  // ---- the service
  class Stream {
   public:
    Stream(ModelService& service, TrainListener& listener)
        : service_(service), listener_(listener) {
      MutexLock lock(service_.mutex_);
      const size_t index = service_.streams_++;
      if (index < service_.breaks.size()) break_ = service_.breaks[index];
    }
    // `values`: the values of a gradient that is sent as a payload.
    void Take(const v1::TrainRequest& message, const std::string& values = "") {
      if (broken_) return;
      if (message.has_open()) {
        v1::TrainResponse opened;
        service_.Position(*opened.mutable_opened());
        listener_.OnMessage(opened, {});
        ++accepted_;
        return;
      }
      const bool last = ++taken_ == break_.up;
      if (last && !break_.accepted && message.has_shared_gradients()) {
        v1::TrainRequest part = message;
        auto& chunks = *part.mutable_shared_gradients()->mutable_chunks();
        chunks.Truncate(std::min(break_.chunks, chunks.size()));
        service_.Handle(part, values);
      }
      if (!last || break_.accepted) {
        std::vector<v1::TrainResponse> answers = service_.Handle(message, values);
        const size_t before = accepted_;
        accepted_ += message.has_shared_gradients() ? message.shared_gradients().chunks_size() : 1;
        const bool due = before / service_.ack_every_ != accepted_ / service_.ack_every_;
        if (last ? break_.acked : due) Acknowledge();
        for (const v1::TrainResponse& answer : answers) Say(answer);
      }
      if (last) Break();
    }

   private:
    void Acknowledge() {
      v1::TrainResponse response;
      response.mutable_acknowledged()->set_messages(accepted_);
      listener_.OnMessage(response, {});
    }
    void Say(const v1::TrainResponse& message) {
      if (broken_) return;
      if (++said_ == break_.down) return Break();
      if (message.has_shared_weights()) {
        const int chunk = static_cast<int>(message.shared_weights().chunks(0));
        service_.memory->WriteWeights(chunk,
                                      service_.Weights(message.shared_weights().step(), chunk));
      }
      if (!message.has_weights()) return listener_.OnMessage(message, {});
      const v1::WeightHeader& header = message.weights().header();
      const std::string bytes = service_.Weights(header.step(), static_cast<int>(header.chunk()));
      listener_.OnMessage(
          message,
          {absl::MakeConstSpan(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size())});
    }
    void Break() {
      if (broken_) return;
      broken_ = true;
      listener_.OnClosed(absl::UnavailableError("connection lost"));
    }

    ModelService& service_;
    TrainListener& listener_;
    BreakPoint break_;
    bool broken_ = false;
    size_t taken_ = 0;
    size_t accepted_ = 0;
    size_t said_ = 0;
  };

  v1::AttachWorkerResponse Attach(const v1::AttachWorkerRequest& request) const {
    MutexLock lock(mutex_);
    v1::AttachWorkerResponse response;
    if (memory != nullptr && request.shared_memory()) *response.mutable_shared_memory() = offer;
    response.set_uid("u");
    response.set_instance_id("i");
    response.mutable_generation()->set_count(1);
    response.set_committed_step(committed_);
    *response.mutable_job() = job_;
    return response;
  }
  uint64_t committed() const {
    MutexLock lock(mutex_);
    return committed_;
  }

 private:
  void Position(v1::Opened& opened) const {
    MutexLock lock(mutex_);
    opened.set_committed_step(committed_);
    opened.set_open_step(open_);
    opened.set_micro_steps_ended(ended_);
    for (size_t chunk = 0; chunk < next_.size(); ++chunk) {
      if (next_[chunk] == 0) continue;
      v1::ChunkCount& count = *opened.add_delivered();
      count.set_chunk(static_cast<uint32_t>(chunk));
      count.set_next_micro_step(next_[chunk]);
    }
  }

  std::vector<v1::TrainResponse> Handle(const v1::TrainRequest& message,
                                        const std::string& values) {
    MutexLock lock(mutex_);
    const std::string name = NameOf(message);
    for (const uint32_t chunk : message.shared_gradients().chunks()) {
      HandleGradient(HeaderOf(message, chunk), std::nullopt);
    }
    if (message.has_shared_gradients()) return {};
    if (message.has_gradient()) {
      HandleGradient(message.gradient().header(), values);
      return {};
    }
    bool good = false;
    if (message.has_begin_step()) {
      good = message.begin_step().step() == committed_ + 1 && open_ == 0;
      open_ = message.begin_step().step();
    } else if (message.has_end_micro_step()) {
      good = message.end_micro_step().step() == open_ &&
             message.end_micro_step().micro_step() == ended_;
      ++ended_;
    } else if (message.has_seal()) {
      good = message.seal().step() == open_ && message.seal().micro_steps() == ended_;
      for (uint32_t next : next_) good = good && next == ended_;
      for (const v1::GradientHeader& header : in_place_) {
        good = good && memory->gradient(static_cast<int>(header.chunk())) == Expected(header);
      }
    }
    taken_.push_back(good ? name : "WRONG " + name);
    return message.has_seal() && good ? Decide() : std::vector<v1::TrainResponse>();
  }

  static v1::GradientHeader HeaderOf(const v1::TrainRequest& message, uint32_t chunk) {
    const v1::SharedGradients& shared = message.shared_gradients();
    v1::GradientHeader header;
    header.set_step(shared.step());
    header.set_chunk(chunk);
    header.set_micro_step_begin(shared.micro_step_begin());
    header.set_micro_step_end(shared.micro_step_end());
    header.set_final(shared.final());
    return header;
  }
  std::string Expected(const v1::GradientHeader& header) const {
    return Gradient(header.step(), static_cast<int>(header.chunk()), header.micro_step_begin());
  }

  // A gradient without values is in shared memory.
  void HandleGradient(const v1::GradientHeader& header, std::optional<std::string> values)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const std::string name = NameOf(header);
    uint32_t& next = next_[header.chunk()];
    if (header.step() == open_ && header.micro_step_end() <= next) {
      repeats_.push_back(name);
      return;
    }
    bool good = header.step() == open_ && header.micro_step_begin() == next;
    if (!values.has_value()) {
      ++shared_;
      good = good && memory != nullptr;
      // A final gradient that is the chunk's first is read in place when the step is decided.
      if (good && header.final() && next == 0) in_place_.push_back(header);
      if (good) values = memory->gradient(static_cast<int>(header.chunk()));
    }
    good = good && values == Expected(header);
    next = header.micro_step_end();
    taken_.push_back(good ? name : "WRONG " + name);
  }

  std::vector<v1::TrainResponse> Decide() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    std::vector<v1::TrainResponse> answers;
    committed_ = std::exchange(open_, 0);
    ended_ = 0;
    next_.assign(next_.size(), 0);
    in_place_.clear();
    v1::StepRecord& record = *job_.add_recent_steps();
    record.set_step(committed_);
    record.set_applied(applies);
    record.set_norm(static_cast<double>(committed_) / 4);
    v1::StepDecision& decision = *answers.emplace_back().mutable_decision();
    decision.set_step(committed_);
    decision.set_applied(applies);
    decision.set_norm(record.norm());
    for (size_t chunk = 0; applies && chunk < next_.size(); ++chunk) {
      if (memory != nullptr) {
        v1::SharedWeights& weights = *answers.emplace_back().mutable_shared_weights();
        weights.set_step(committed_);
        weights.add_chunks(static_cast<uint32_t>(chunk));
        continue;
      }
      v1::WeightHeader& header = *answers.emplace_back().mutable_weights()->mutable_header();
      header.set_step(committed_);
      header.set_chunk(static_cast<uint32_t>(chunk));
    }
    answers.emplace_back().mutable_committed()->set_step(committed_);
    return answers;
  }

  const std::vector<size_t> weight_bytes_;
  const size_t ack_every_;
  mutable Mutex mutex_;
  v1::Job job_ ABSL_GUARDED_BY(mutex_);
  uint64_t committed_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t open_ ABSL_GUARDED_BY(mutex_) = 0;
  uint32_t ended_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<uint32_t> next_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> taken_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> repeats_ ABSL_GUARDED_BY(mutex_);
  std::vector<v1::GradientHeader> in_place_ ABSL_GUARDED_BY(mutex_);  // The open step's.
  size_t streams_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t shared_ ABSL_GUARDED_BY(mutex_) = 0;
};

class ModelTransport final : public Transport {
 public:
  explicit ModelTransport(ModelService& service) : service_(service) {}

  absl::StatusOr<v1::Job> CreateJob(const v1::CreateJobRequest& request,
                                    absl::Duration limit) override {
    return request.job();
  }
  absl::StatusOr<v1::Job> GetJob(const v1::GetJobRequest& request) override { return v1::Job(); }
  absl::StatusOr<v1::AttachWorkerResponse> AttachWorker(const v1::AttachWorkerRequest& request,
                                                        absl::Duration limit) override {
    return service_.Attach(request);
  }
  absl::StatusOr<v1::UndoStepResponse> UndoStep(const v1::UndoStepRequest& request) override {
    return v1::UndoStepResponse();
  }
  absl::StatusOr<v1::SaveJobResponse> SaveJob(const v1::SaveJobRequest& request) override {
    return v1::SaveJobResponse();
  }
  absl::StatusOr<v1::LoadJobResponse> LoadJob(const v1::LoadJobRequest& request) override {
    return v1::LoadJobResponse();
  }
  absl::StatusOr<v1::UploadWeightsResponse> UploadWeights(
      const v1::OpenTrain& open, absl::Duration limit, absl::Span<const int> chunks,
      const std::function<std::vector<float>(int chunk)>& fill) override {
    return v1::UploadWeightsResponse();
  }
  absl::StatusOr<uint64_t> ReadWeights(
      const v1::ReadWeightsRequest& request, absl::Duration limit,
      const std::function<absl::Status(const v1::WeightHeader& header, PayloadPieces payload)>&
          place) override {
    const uint64_t step = service_.committed();
    if (request.step() != step) return absl::FailedPreconditionError("at another step");
    for (uint32_t chunk : request.chunks()) {
      v1::WeightHeader header;
      header.set_chunk(chunk);
      header.set_step(step);
      const std::string bytes = service_.Weights(step, static_cast<int>(chunk));
      const absl::Status placed = place(
          header,
          {absl::MakeConstSpan(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size())});
      if (!placed.ok()) return placed;
    }
    return step;
  }
  std::unique_ptr<TrainCall> OpenTrainCall(TrainListener& listener) override {
    return std::make_unique<Stream>(service_, listener);
  }
  bool CanReconnect() override { return true; }
  void CancelCalls() override {}

 private:
  // One thread accepts the messages in order and answers them. It releases each payload before it
  // accepts the message or, every other time, after the end of the stream.
  class Stream final : public TrainCall {
   public:
    Stream(ModelService& service, TrainListener& listener)
        : merges_(service.merges),
          end_(std::make_unique<ModelService::Stream>(service, listener)) {}
    ~Stream() override {
      thread_.Stop();
      for (const std::function<void()>& let_go : late_) let_go();
    }
    void Send(const v1::TrainRequest& message) override {
      SendWaiting();
      thread_.Post([this, message] { end_->Take(message); });
    }
    void SendGradient(const v1::GradientHeader& header, absl::Span<const std::byte> payload,
                      std::function<void()> let_go) override {
      SendWaiting();
      v1::TrainRequest message;
      *message.mutable_gradient()->mutable_header() = header;
      thread_.Post([this, message, payload, let_go = std::move(let_go)] {
        const std::string values(reinterpret_cast<const char*>(payload.data()), payload.size());
        if (late_.size() % 2 == 0) {
          late_.push_back(let_go);
        } else {
          late_.push_back([] {});
          let_go();
        }
        end_->Take(message, values);
      });
    }
    void SendSharedGradient(const v1::GradientHeader& header) override {
      v1::TrainRequest message = SharedGradientRequest(header);
      const v1::SharedGradients& gradients = message.shared_gradients();
      if (!merges_) return Send(message);
      if (waiting_.has_value() && SameButForTheChunks(waiting_->shared_gradients(), gradients)) {
        return waiting_->mutable_shared_gradients()->add_chunks(header.chunk());
      }
      SendWaiting();
      waiting_ = std::move(message);
    }

   private:
    static bool SameButForTheChunks(v1::SharedGradients a, v1::SharedGradients b) {
      a.clear_chunks();
      b.clear_chunks();
      return a.SerializeAsString() == b.SerializeAsString();
    }
    void SendWaiting() {
      if (!waiting_.has_value()) return;
      thread_.Post(
          [this, message = *std::exchange(waiting_, std::nullopt)] { end_->Take(message); });
    }

    const bool merges_;
    // Used by the senders, one at a time by the send log's lock.
    std::optional<v1::TrainRequest> waiting_;
    const std::unique_ptr<ModelService::Stream> end_;
    std::vector<std::function<void()>> late_;  // The thread's, then the destructor's.
    TaskThread thread_;
  };

  ModelService& service_;
};

}  // namespace ballast::client

#endif  // BALLAST_TESTS_CLIENT_MODEL_SERVICE_H_
