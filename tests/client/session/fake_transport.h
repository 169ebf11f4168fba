// A scripted service: the test sends its messages, and sees the messages of the session.
#ifndef BALLAST_TESTS_CLIENT_SESSION_FAKE_TRANSPORT_H_
#define BALLAST_TESTS_CLIENT_SESSION_FAKE_TRANSPORT_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "client/transport/clock.h"
#include "client/transport/transport.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "tests/client/session/message_name.h"

namespace ballast::client {

// Time passes only in sleeps, of any thread.
class FakeClock final : public Clock {
 public:
  absl::Time Now() override {
    MutexLock lock(mutex_);
    return now_;
  }
  void SleepFor(absl::Duration duration) override {
    MutexLock lock(mutex_);
    sleeps.push_back(duration);
    now_ += duration;
  }
  void WaitFor(Mutex& mutex, CondVar& changed, absl::Duration duration)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) override {
    MutexLock lock(mutex_);
    if (stands_still) {
      ++waiting_;
      waits_.NotifyAll();
      mutex_.Unlock();
      changed.Wait(mutex);
      mutex_.Lock();
      return;
    }
    sleeps.push_back(duration);
    now_ += duration;
  }
  // Returns when a thread waits on a clock that stands still.
  void AwaitWaiter() {
    MutexLock lock(mutex_);
    while (waiting_ == 0) waits_.Wait(mutex_);
  }
  std::vector<absl::Duration> sleeps;      // Read it when no thread sleeps.
  std::atomic<bool> stands_still = false;  // A wait ends only when it is woken.

 private:
  Mutex mutex_;
  CondVar waits_;
  int waiting_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Time now_ ABSL_GUARDED_BY(mutex_) = absl::FromUnixSeconds(1000);
};

// Runs tasks in order on one thread, like a stream that calls its listener.
class TaskThread {
 public:
  TaskThread() : thread_([this] { Run(); }) {}
  ~TaskThread() { Stop(); }
  // Tasks that are posted later are dropped.
  void Stop() {
    Post(nullptr);
    if (thread_.joinable()) thread_.join();
  }
  void Post(std::function<void()> task) {
    MutexLock lock(mutex_);
    if (stopped_) return;
    stopped_ = task == nullptr;
    tasks_.push_back(std::move(task));
    changed_.NotifyAll();
  }
  // Returns when all tasks posted so far have run or been dropped.
  void Drain() {
    MutexLock lock(mutex_);
    const uint64_t wanted = run_ + tasks_.size();
    while (run_ < wanted) changed_.Wait(mutex_);
  }

 private:
  void Run() {
    for (;;) {
      std::function<void()> task;
      {
        MutexLock lock(mutex_);
        while (tasks_.empty()) changed_.Wait(mutex_);
        task = std::move(tasks_.front());
      }
      if (task) task();
      MutexLock lock(mutex_);
      tasks_.pop_front();
      ++run_;
      changed_.NotifyAll();
      if (!task) return;
    }
  }

  Mutex mutex_;
  CondVar changed_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mutex_);  // The first may be running.
  uint64_t run_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

class FakeTransport final : public Transport {
 public:
  struct Gradient {
    v1::GradientHeader header;
    absl::Span<const std::byte> payload;
    bool shared = false;
  };

  // ---- what the test sets before opening a session
  std::vector<absl::Status> create_results;  // Taken one by one; OK when there is none.
  std::vector<absl::Status> attach_results;
  // GetJob's results, one by one; the last one is repeated. A job without a uid gets the
  // attachment's.
  std::vector<v1::Job> jobs;
  std::vector<absl::Status> get_results;
  std::vector<absl::Status> upload_results;
  v1::AttachWorkerResponse attachment;
  absl::Status open_error;  // If not OK, the stream ends with it instead of opening.
  // What ReadWeights sends, each with the step `read_step`.
  std::vector<std::pair<uint32_t, std::string>> stored_weights;
  uint64_t read_step = 0;
  struct ReadFailure {
    size_t after_chunks = 0;
    absl::Status status;
  };
  std::vector<ReadFailure> read_failures;  // Taken one by one.
  absl::Status load_result;
  absl::Status undo_result;
  size_t undos_lost = 0;  // The first ones are not answered.
  std::vector<v1::UndoStepRequest> undo_requests;
  // ---- and before the stream breaks: the answers of the next streams when they open, one by one.
  // Without one: nothing delivered, at the step of the attachment.
  std::vector<v1::Opened> opened;
  // AttachWorker does not return before its call is cancelled or LetAttach is called.
  std::atomic<bool> attach_hangs = false;
  std::atomic<bool> open_hangs = false;  // The opening of a stream is not answered.
  // How a stream ends right after its answer, before the thread that opens it looks. OK: it does
  // not end.
  absl::Status ends_at_once;
  std::function<void()> on_stream;  // Called when a stream is opened. Nullable.

  // ---- what the test sees
  int creates = 0;
  v1::CreateJobRequest last_create;
  std::atomic<int> attaches = 0;
  v1::AttachWorkerRequest last_attach;
  std::vector<v1::ReadWeightsRequest> reads;
  std::vector<std::pair<int, std::vector<float>>> uploaded;
  v1::FirstState uploaded_state;

  // Sends a message on the latest stream and waits until the session has handled it.
  void Deliver(const v1::TrainResponse& message, std::vector<std::string> pieces = {}) {
    const std::shared_ptr<Wire> wire = Latest();
    wire->thread.Post([wire, message, pieces] {
      std::vector<absl::Span<const std::byte>> spans;
      for (const std::string& piece : pieces) {
        spans.emplace_back(reinterpret_cast<const std::byte*>(piece.data()), piece.size());
      }
      wire->listener.OnMessage(message, spans);
    });
    wire->thread.Drain();
  }
  void Break(const absl::Status& status) {
    const std::shared_ptr<Wire> wire = Latest();
    wire->thread.Post([wire, status] { wire->listener.OnClosed(status); });
    wire->thread.Drain();
  }
  // Returns when the session has been told what the latest stream has answered so far.
  void AwaitAnswers() { Latest()->thread.Drain(); }
  // The transport no longer uses the payloads sent so far.
  void LetGo() {
    std::vector<std::function<void()>> borrowed;
    {
      MutexLock lock(mutex_);
      borrowed.swap(borrowed_);
    }
    for (std::function<void()>& let_go : borrowed) let_go();
  }

  std::vector<v1::TrainRequest> sent() const {
    MutexLock lock(mutex_);
    return sent_;
  }
  std::vector<Gradient> gradients() const {
    MutexLock lock(mutex_);
    return gradients_;
  }
  // Waits until this many messages, gradients included, have been sent. False if that takes too
  // long.
  bool AwaitSent(size_t messages, std::chrono::milliseconds limit = std::chrono::seconds(20)) {
    const auto deadline = std::chrono::steady_clock::now() + limit;
    MutexLock lock(mutex_);
    while (sent_.size() + gradients_.size() < messages) {
      if (!changed_.WaitUntil(mutex_, deadline)) return false;
    }
    return true;
  }

  void LetAttach() {
    MutexLock lock(mutex_);
    attach_hangs = false;
    changed_.NotifyAll();
  }
  // Waits until the stream of this number, from 1, has carried this many messages. False if that
  // takes too long.
  bool AwaitStream(size_t number, size_t messages,
                   std::chrono::milliseconds limit = std::chrono::seconds(20)) {
    const auto deadline = std::chrono::steady_clock::now() + limit;
    MutexLock lock(mutex_);
    while (streams_.size() < number || streams_[number - 1].size() < messages) {
      if (!changed_.WaitUntil(mutex_, deadline)) return false;
    }
    return true;
  }
  bool AwaitAttaches(int wanted) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    MutexLock lock(mutex_);
    while (attaches < wanted) {
      if (!changed_.WaitUntil(mutex_, deadline)) return false;
    }
    return true;
  }
  size_t streams() const {
    MutexLock lock(mutex_);
    return streams_.size();
  }
  // The messages that the stream of this number, from 1, has carried, in words.
  std::vector<std::string> names(size_t number) const {
    MutexLock lock(mutex_);
    return streams_.at(number - 1);
  }

  // ---- Transport
  absl::StatusOr<v1::Job> CreateJob(const v1::CreateJobRequest& request,
                                    absl::Duration limit) override {
    ++creates;
    last_create = request;
    if (absl::Status status = Take(create_results); !status.ok()) return status;
    return request.job();
  }
  absl::StatusOr<v1::Job> GetJob(const v1::GetJobRequest& request) override {
    if (jobs.empty()) return absl::NotFoundError("no such job");
    if (absl::Status status = Take(get_results); !status.ok()) return status;
    v1::Job job = jobs.front();
    if (jobs.size() > 1) jobs.erase(jobs.begin());
    if (job.uid().empty()) job.set_uid(attachment.uid());
    if (!request.uid().empty() && request.uid() != job.uid()) {
      return absl::NotFoundError(absl::StrCat("has uid ", job.uid(), ", not ", request.uid()));
    }
    return job;
  }
  absl::StatusOr<v1::AttachWorkerResponse> AttachWorker(const v1::AttachWorkerRequest& request,
                                                        absl::Duration limit) override {
    last_attach = request;
    ++attaches;
    if (attach_hangs) {
      MutexLock lock(mutex_);
      changed_.NotifyAll();
      while (attach_hangs && !cancelled_) changed_.Wait(mutex_);
      if (cancelled_) return absl::CancelledError("cancelled");
    }
    if (absl::Status status = Take(attach_results); !status.ok()) return status;
    return attachment;
  }
  absl::StatusOr<v1::UndoStepResponse> UndoStep(const v1::UndoStepRequest& request) override {
    undo_requests.push_back(request);
    if (undo_requests.size() <= undos_lost) return absl::UnavailableError("socket closed");
    if (!undo_result.ok()) return undo_result;
    v1::UndoStepResponse response;
    response.set_undone_step(attachment.committed_step());
    return response;
  }
  absl::StatusOr<v1::SaveJobResponse> SaveJob(const v1::SaveJobRequest& request) override {
    return v1::SaveJobResponse();
  }
  absl::StatusOr<v1::LoadJobResponse> LoadJob(const v1::LoadJobRequest& request) override {
    if (!load_result.ok()) return load_result;
    return v1::LoadJobResponse();
  }
  absl::StatusOr<v1::UploadWeightsResponse> UploadWeights(
      const v1::OpenTrain& open, absl::Duration limit, absl::Span<const int> chunks,
      const std::function<std::vector<std::byte>(int chunk)>& fill) override {
    uploaded_state = open.first_state();
    if (absl::Status status = Take(upload_results); !status.ok()) return status;
    for (int chunk : chunks) {
      const std::vector<std::byte> bytes = fill(chunk);
      const auto* const values = reinterpret_cast<const float*>(bytes.data());
      uploaded.emplace_back(chunk, std::vector(values, values + bytes.size() / sizeof(float)));
    }
    v1::UploadWeightsResponse response;
    response.set_chunks(static_cast<int64_t>(chunks.size()));
    return response;
  }
  absl::StatusOr<v1::ReadWeightsResponse> ReadWeights(
      const v1::ReadWeightsRequest& request, absl::Duration limit,
      const std::function<absl::Status(const v1::WeightHeader& header, PayloadPieces payload)>&
          place) override {
    reads.push_back(request);
    std::optional<ReadFailure> failure;
    if (!read_failures.empty()) {
      failure = read_failures.front();
      read_failures.erase(read_failures.begin());
    }
    size_t placed = 0;
    for (const auto& [chunk, bytes] : stored_weights) {
      if (failure.has_value() && placed == failure->after_chunks) break;
      if (std::count(request.chunks().begin(), request.chunks().end(), chunk) == 0) continue;
      ++placed;
      v1::WeightHeader header;
      header.set_chunk(chunk);
      header.set_step(read_step);
      const absl::Span<const std::byte> piece(reinterpret_cast<const std::byte*>(bytes.data()),
                                              bytes.size());
      if (absl::Status status = place(header, {piece}); !status.ok()) return status;
    }
    if (failure.has_value()) return failure->status;
    v1::ReadWeightsResponse first;
    first.set_step(read_step);
    return first;
  }
  std::unique_ptr<TrainCall> OpenTrainCall(TrainListener& listener) override {
    if (on_stream) on_stream();
    auto wire = std::make_shared<Wire>(listener);
    MutexLock lock(mutex_);
    latest_ = wire;
    streams_.emplace_back();
    return std::make_unique<Stream>(*this, std::move(wire), streams_.size() - 1);
  }
  bool CanReconnect() override { return true; }
  void CancelCalls() override {
    MutexLock lock(mutex_);
    cancelled_ = true;
    changed_.NotifyAll();
  }

 private:
  // From the service to the session.
  struct Wire {
    explicit Wire(TrainListener& listener) : listener(listener) {}
    TrainListener& listener;
    TaskThread thread;
  };
  class Stream final : public TrainCall {
   public:
    Stream(FakeTransport& fake, std::shared_ptr<Wire> wire, size_t index)
        : fake_(fake), wire_(std::move(wire)), index_(index) {}
    ~Stream() override {
      wire_->thread.Stop();
      fake_.LetGo();
    }
    void Send(const v1::TrainRequest& message) override {
      if (message.has_open() && !fake_.open_hangs) {
        wire_->thread.Post([this] { fake_.AnswerOpen(wire_->listener); });
        if (!fake_.ends_at_once.ok()) wire_->thread.Drain();
      }
      MutexLock lock(fake_.mutex_);
      fake_.sent_.push_back(message);
      fake_.streams_[index_].push_back(NameOf(message));
      fake_.changed_.NotifyAll();
    }
    void SendGradient(const v1::GradientHeader& header, absl::Span<const std::byte> payload,
                      std::function<void()> let_go) override {
      MutexLock lock(fake_.mutex_);
      fake_.gradients_.push_back({header, payload});
      fake_.streams_[index_].push_back(NameOf(header));
      fake_.borrowed_.push_back(std::move(let_go));
      fake_.changed_.NotifyAll();
    }
    void SendSharedGradient(const v1::GradientHeader& header) override {
      MutexLock lock(fake_.mutex_);
      fake_.gradients_.push_back({.header = header, .payload = {}, .shared = true});
      fake_.streams_[index_].push_back("shared " + NameOf(header));
      fake_.changed_.NotifyAll();
    }

   private:
    FakeTransport& fake_;
    const std::shared_ptr<Wire> wire_;
    const size_t index_;
  };

  static absl::Status Take(std::vector<absl::Status>& results) {
    if (results.empty()) return absl::OkStatus();
    const absl::Status status = results.front();
    results.erase(results.begin());
    return status;
  }
  std::shared_ptr<Wire> Latest() const {
    MutexLock lock(mutex_);
    return latest_;
  }
  void AnswerOpen(TrainListener& listener) {
    if (!open_error.ok()) {
      listener.OnClosed(open_error);
      return;
    }
    v1::TrainResponse answer;
    answer.mutable_opened()->set_committed_step(attachment.committed_step());
    if (!opened.empty()) {
      *answer.mutable_opened() = opened.front();
      opened.erase(opened.begin());
    }
    listener.OnMessage(answer, {});
    if (!ends_at_once.ok()) listener.OnClosed(ends_at_once);
  }

  mutable Mutex mutex_;
  CondVar changed_;
  std::shared_ptr<Wire> latest_ ABSL_GUARDED_BY(mutex_);
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<v1::TrainRequest> sent_ ABSL_GUARDED_BY(mutex_);
  std::vector<Gradient> gradients_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::vector<std::string>> streams_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::function<void()>> borrowed_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::client

#endif  // BALLAST_TESTS_CLIENT_SESSION_FAKE_TRANSPORT_H_
