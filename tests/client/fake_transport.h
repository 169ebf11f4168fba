// A service made of a script: the test says what comes down, and sees what went up.
#ifndef BALLAST_TESTS_CLIENT_FAKE_TRANSPORT_H_
#define BALLAST_TESTS_CLIENT_FAKE_TRANSPORT_H_

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "client/transport.h"
#include "cpu_optimizer_service/common/mutex.h"

namespace ballast::client {

// Time passes only when somebody sleeps.
class FakeClock final : public Clock {
 public:
  absl::Time Now() override { return now_; }
  void SleepFor(absl::Duration duration) override {
    sleeps.push_back(duration);
    now_ += duration;
  }
  std::vector<absl::Duration> sleeps;

 private:
  absl::Time now_ = absl::FromUnixSeconds(1000);
};

// Runs tasks in order on one thread, as a stream calls its listener.
class TaskThread {
 public:
  TaskThread() : thread_([this] { Run(); }) {}
  ~TaskThread() {
    Post(nullptr);
    thread_.join();
  }
  void Post(std::function<void()> task) {
    MutexLock lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.NotifyAll();
  }
  // Returns when everything posted so far has run.
  void Drain() {
    bool done = false;
    Post([&] {
      MutexLock lock(mutex_);
      done = true;
      changed_.NotifyAll();
    });
    MutexLock lock(mutex_);
    while (!done) changed_.Wait(mutex_);
  }

 private:
  void Run() {
    for (;;) {
      std::function<void()> task;
      {
        MutexLock lock(mutex_);
        while (tasks_.empty()) changed_.Wait(mutex_);
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      if (!task) return;
      task();
    }
  }

  Mutex mutex_;
  CondVar changed_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

class FakeTransport final : public Transport {
 public:
  struct Gradient {
    v1::GradientHeader header;
    absl::Span<const std::byte> payload;
  };

  // ---- what the test sets before opening a session
  std::vector<absl::Status> create_results;  // Taken one by one; OK when there is none.
  std::vector<absl::Status> attach_results;
  std::vector<v1::Job> jobs;  // What GetJob says, one by one; the last one again and again.
  v1::AttachWorkerResponse attachment;
  absl::Status open_error;  // If not OK, the stream ends with it instead of opening.
  // What ReadWeights sends, each with the step `read_step`.
  std::vector<std::pair<uint32_t, std::string>> stored_weights;
  uint64_t read_step = 0;
  absl::Status load_result;

  // ---- what the test sees
  int creates = 0;
  int attaches = 0;
  v1::AttachWorkerRequest last_attach;
  std::vector<std::pair<int, std::vector<float>>> uploaded;

  // Sends a message down and waits until the session has taken it.
  void Deliver(const v1::TrainResponse& message, std::vector<std::string> pieces = {}) {
    Post([this, message, pieces] {
      std::vector<absl::Span<const std::byte>> spans;
      for (const std::string& piece : pieces) {
        spans.emplace_back(reinterpret_cast<const std::byte*>(piece.data()), piece.size());
      }
      listener_->OnMessage(message, spans);
    });
    thread_->Drain();
  }
  void Break(const absl::Status& status) {
    Post([this, status] { listener_->OnClosed(status); });
    thread_->Drain();
  }
  // The transport has no more use for the payloads sent so far.
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
  // Waits until so many messages, gradients included, have been sent; false if that takes too long.
  bool AwaitSent(size_t messages, std::chrono::milliseconds limit = std::chrono::seconds(20)) {
    const auto deadline = std::chrono::steady_clock::now() + limit;
    MutexLock lock(mutex_);
    while (sent_.size() + gradients_.size() < messages) {
      if (!changed_.WaitUntil(mutex_, deadline)) return false;
    }
    return true;
  }

  // ---- Transport
  absl::StatusOr<v1::Job> CreateJob(const v1::CreateJobRequest& request) override {
    ++creates;
    if (absl::Status status = Take(create_results); !status.ok()) return status;
    return request.job();
  }
  absl::StatusOr<v1::Job> GetJob(const v1::GetJobRequest& request) override {
    if (jobs.empty()) return absl::NotFoundError("no such job");
    const v1::Job job = jobs.front();
    if (jobs.size() > 1) jobs.erase(jobs.begin());
    return job;
  }
  absl::StatusOr<v1::AttachWorkerResponse> AttachWorker(
      const v1::AttachWorkerRequest& request) override {
    ++attaches;
    last_attach = request;
    if (absl::Status status = Take(attach_results); !status.ok()) return status;
    return attachment;
  }
  absl::StatusOr<v1::SaveJobResponse> SaveJob(const v1::SaveJobRequest& request) override {
    return v1::SaveJobResponse();
  }
  absl::StatusOr<v1::LoadJobResponse> LoadJob(const v1::LoadJobRequest& request) override {
    if (!load_result.ok()) return load_result;
    return v1::LoadJobResponse();
  }
  absl::StatusOr<v1::UploadWeightsResponse> UploadWeights(
      const v1::OpenTrain& open, absl::Span<const int> chunks,
      const std::function<std::vector<float>(int chunk)>& fill) override {
    for (int chunk : chunks) uploaded.emplace_back(chunk, fill(chunk));
    v1::UploadWeightsResponse response;
    response.set_chunks(static_cast<int64_t>(uploaded.size()));
    return response;
  }
  absl::StatusOr<uint64_t> ReadWeights(
      const v1::ReadWeightsRequest& request,
      const std::function<absl::Status(const v1::WeightHeader& header, PayloadPieces payload)>&
          place) override {
    for (const auto& [chunk, bytes] : stored_weights) {
      v1::WeightHeader header;
      header.set_chunk(chunk);
      header.set_step(read_step);
      const absl::Span<const std::byte> piece(reinterpret_cast<const std::byte*>(bytes.data()),
                                              bytes.size());
      if (absl::Status status = place(header, {piece}); !status.ok()) return status;
    }
    return read_step;
  }
  std::unique_ptr<TrainStream> OpenTrainStream(TrainListener& listener) override {
    listener_ = &listener;
    thread_ = std::make_unique<TaskThread>();
    return std::make_unique<Stream>(*this);
  }

 private:
  class Stream final : public TrainStream {
   public:
    explicit Stream(FakeTransport& fake) : fake_(fake) {}
    ~Stream() override {
      fake_.thread_.reset();
      fake_.LetGo();
    }
    void Send(const v1::TrainRequest& message) override {
      if (message.has_open()) fake_.Post([this] { fake_.AnswerOpen(); });
      MutexLock lock(fake_.mutex_);
      fake_.sent_.push_back(message);
      fake_.changed_.NotifyAll();
    }
    void SendGradient(const v1::GradientHeader& header, absl::Span<const std::byte> payload,
                      std::function<void()> let_go) override {
      MutexLock lock(fake_.mutex_);
      fake_.gradients_.push_back({header, payload});
      fake_.borrowed_.push_back(std::move(let_go));
      fake_.changed_.NotifyAll();
    }

   private:
    FakeTransport& fake_;
  };

  static absl::Status Take(std::vector<absl::Status>& results) {
    if (results.empty()) return absl::OkStatus();
    const absl::Status status = results.front();
    results.erase(results.begin());
    return status;
  }
  void Post(std::function<void()> task) { thread_->Post(std::move(task)); }
  void AnswerOpen() {
    if (!open_error.ok()) {
      listener_->OnClosed(open_error);
      return;
    }
    v1::TrainResponse opened;
    opened.mutable_opened();
    listener_->OnMessage(opened, {});
  }

  TrainListener* listener_ = nullptr;
  std::unique_ptr<TaskThread> thread_;
  mutable Mutex mutex_;
  CondVar changed_;
  std::vector<v1::TrainRequest> sent_ ABSL_GUARDED_BY(mutex_);
  std::vector<Gradient> gradients_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::function<void()>> borrowed_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace ballast::client

#endif  // BALLAST_TESTS_CLIENT_FAKE_TRANSPORT_H_
