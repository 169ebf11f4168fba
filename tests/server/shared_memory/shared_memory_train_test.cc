// Whole jobs over shared memory: the same bits, and what a worker can do to others there.
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/wait.h>

#include <atomic>
#include <random>
#include <thread>

#include "tests/server/jobs/malformed_input.h"
#include "tests/server/shared_memory/sharing_worker.h"

namespace ballast::server {
namespace {

struct Trained {
  std::string state_hash;
  std::map<int, std::string> weights;  // By chunk, after the last step.
  bool operator==(const Trained&) const = default;
};

constexpr int kSteps = 3;

void SendAsPayloads(TestWorker& worker, uint64_t step, uint32_t micro_steps) {
  worker.Begin(step);
  for (uint32_t micro_step = 0; micro_step < micro_steps; ++micro_step) {
    for (const int chunk : worker.chunks()) {
      worker.Gradient(step, chunk, micro_step, 0.25f * (chunk + 1) + micro_step);
    }
    worker.EndMicroStep(step, micro_step);
  }
  worker.Seal(step, micro_steps);
}

// Ranks 0 and 1, each over shared memory or not.
Trained Train(uint32_t micro_steps, const std::vector<bool>& shares) {
  ServiceForTests service;
  CreateTinyJob(service, "tiny");
  std::vector<std::unique_ptr<TestWorker>> workers;
  for (const int rank : {0, 1}) {
    if (shares[rank]) {
      auto worker = std::make_unique<SharingWorker>(service, "tiny", rank);
      worker->JoinAndOpenStream();
      workers.push_back(std::move(worker));
    } else {
      workers.push_back(std::make_unique<TestWorker>(service, "tiny", rank, Codec::kFrames));
      EXPECT_TRUE(workers.back()->Attach().ok());
      workers.back()->OpenStream();
    }
  }
  Trained trained;
  for (uint64_t step = 1; step <= kSteps; ++step) {
    for (const auto& worker : workers) {
      auto* sharing = dynamic_cast<SharingWorker*>(worker.get());
      if (sharing != nullptr) {
        sharing->SendStepInPlace(step, micro_steps);
      } else {
        SendAsPayloads(*worker, step, micro_steps);
      }
    }
    trained.weights.clear();
    for (const auto& worker : workers) {
      auto* sharing = dynamic_cast<SharingWorker*>(worker.get());
      if (sharing == nullptr) worker->ReadUntilCommitted();
      trained.weights.merge(sharing != nullptr ? sharing->ReadStepInPlace()
                                               : std::map(worker->weights()));
    }
    EXPECT_EQ(trained.weights.size(), 3);
  }
  trained.state_hash = service.StateHash("tiny");
  return trained;
}

TEST(SharedMemoryTrain, GivesTheSameBitsAsPayloads) {
  for (const uint32_t micro_steps : {1, 2, 3}) {
    const Trained expected = Train(micro_steps, {false, false});
    EXPECT_EQ(Train(micro_steps, {true, true}), expected) << micro_steps;
    EXPECT_EQ(Train(micro_steps, {true, false}), expected) << micro_steps;
  }
}

v1::AttachWorkerResponse Attach(ServiceForTests& service, const v1::AttachWorkerRequest& request) {
  grpc::ClientContext context;
  v1::AttachWorkerResponse response;
  const grpc::Status status = service.jobs().AttachWorker(&context, request, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return response;
}

TEST(SharedMemoryTrain, IsOfferedToAProcessThatTakesARankAndAsks) {
  for (const bool allowed : {true, false}) {
    ServiceForTests service({.listen = {"127.0.0.1:0"}, .shared_memory = allowed});
    CreateTinyJob(service, "tiny");
    v1::AttachWorkerRequest request;
    request.set_name("jobs/tiny");
    request.set_process_id("p");
    EXPECT_FALSE(Attach(service, request).has_shared_memory());
    request.set_shared_memory(true);
    const v1::AttachWorkerResponse response = Attach(service, request);
    EXPECT_EQ(response.has_shared_memory(), allowed);
    // A stream that is opened again goes on with the memory that it has.
    *request.mutable_generation() = response.generation();
    EXPECT_FALSE(Attach(service, request).has_shared_memory());
  }
}

class SharedMemoryStep : public testing::Test {
 protected:
  void SetUp() override {
    CreateTinyJob(service_, "tiny");
    first_.JoinAndOpenStream();
    second_.JoinAndOpenStream();
  }

  v1::Job Job() {
    grpc::ClientContext context;
    v1::GetJobRequest request;
    request.set_name("jobs/tiny");
    v1::Job job;
    EXPECT_TRUE(service_.jobs().GetJob(&context, request, &job).ok());
    return job;
  }

  ServiceForTests service_;
  SharingWorker first_{service_, "tiny", 0};
  SharingWorker second_{service_, "tiny", 1};
};

TEST_F(SharedMemoryStep, IsShownInTheJob) {
  EXPECT_EQ(Job().memory().shared_bytes(),
            static_cast<int64_t>(first_.memory().size() + second_.memory().size()));
  EXPECT_TRUE(Job().ranks(0).shared_memory());
  second_.LetGo();
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (Job().ranks(1).shared_memory() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_FALSE(Job().ranks(1).shared_memory());
  EXPECT_EQ(Job().memory().shared_bytes(), static_cast<int64_t>(first_.memory().size()));
}

TEST_F(SharedMemoryStep, AcknowledgesEveryChunkAsAMessage) {
  second_.Begin(1);
  for (const int chunk : {1, 2}) second_.Fill(chunk, 1);
  second_.Send(SharingWorker::SharedGradients(1, {0, 1}, 0, false));
  EXPECT_EQ(second_.written(), 4);  // Open, begin, two chunks.
  second_.ReadUntilAcknowledged();
}

TEST_F(SharedMemoryStep, EndsWellWhenTheMemoryIsDroppedInIt) {
  const Trained expected = Train(1, {true, true});
  first_.SendStepInPlace(1, 1);
  second_.Begin(1);
  for (const int chunk : {1, 2}) second_.Fill(chunk, 0.25f * (chunk + 1));
  second_.Send(SharingWorker::SharedGradients(1, {0, 1}, 0, /*final=*/true));
  second_.ReadUntilAcknowledged();
  second_.LetGo();
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (Job().ranks(1).shared_memory() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  second_.EndMicroStep(1, 0);
  second_.Seal(1, 1);
  second_.ReadUntilCommitted();  // Weights come as payloads now, or lie where they did.
  EXPECT_TRUE(second_.decision().applied());
  first_.ReadStepInPlace();
  for (uint64_t step = 2; step <= kSteps; ++step) {
    first_.SendStepInPlace(step, 1);
    SendAsPayloads(second_, step, 1);
    first_.ReadStepInPlace();
    second_.ReadUntilCommitted();
    EXPECT_EQ(second_.weights().size(), 2);
  }
  EXPECT_EQ(service_.StateHash("tiny"), expected.state_hash);
}

// ---------------------------------------------------------------- many chunks

TEST(SharedMemoryTrain, TellsTheWeightsOfManyChunksInFewMessages) {
  constexpr int kChunks = 400;
  ServiceForTests service;
  v1::Job job = TinyJob("large", 1);
  job.mutable_parameters(0)->set_shape(0, int64_t{kChunks - 2} * 256 - 40);
  job.mutable_partitions(1)->set_end(int64_t{kChunks - 2} * 256);
  grpc::ClientContext context;
  v1::CreateJobRequest request;
  *request.mutable_job() = job;
  v1::Job created;
  const grpc::Status status = service.jobs().CreateJob(&context, request, &created);
  ASSERT_TRUE(status.ok()) << status.error_message();
  const std::shared_ptr<ballast::Job> engine_job = service.engine().FindJob("large").value();
  const std::vector<float> zeros(256);
  const absl::Span<const std::byte> bytes(reinterpret_cast<const std::byte*>(zeros.data()), 1024);
  std::vector<int> chunks;
  for (int chunk = 0; chunk < static_cast<int>(engine_job->layout().chunks().size()); ++chunk) {
    ASSERT_TRUE(engine_job->WriteInitialWeights(chunk, {bytes}).ok());
    chunks.push_back(chunk);
  }
  ASSERT_GE(chunks.size(), kChunks - 2);
  SharingWorker worker(service, "large", 0);
  worker.JoinAndOpenStream();
  worker.Begin(1);
  worker.Send(SharingWorker::SharedGradients(1, chunks, 0, true));
  worker.EndMicroStep(1, 0);
  worker.Seal(1, 1);
  int messages = 0;
  std::vector<int> announced;
  while (true) {
    const v1::TrainResponse message = worker.Next();
    ASSERT_NE(message.kind_case(), v1::TrainResponse::KIND_NOT_SET);
    if (message.has_committed()) break;
    messages += message.has_shared_weights();
    const auto& in_message = message.shared_weights().chunks();
    announced.insert(announced.end(), in_message.begin(), in_message.end());
  }
  EXPECT_LE(messages, 34);
  EXPECT_THAT(announced, testing::UnorderedElementsAreArray(chunks));
}

// ---------------------------------------------------------------- hostile workers

// A stream of rank 0, which shares memory, in step 1; then one bad message.
class MalformedSharedGradients : public MalformedInput {
 protected:
  void SetUp() override { CreateTinyJob(service_, "tiny"); }
};

TEST_F(MalformedSharedGradients, AreRefused) {
  using Code = grpc::StatusCode;
  const struct {
    const char* what;
    Code code;
    std::function<void(v1::SharedGradients&)> spoil;
  } kCases[] = {
      {"no chunks", Code::INVALID_ARGUMENT, [](v1::SharedGradients& m) { m.clear_chunks(); }},
      {"more than the rank has", Code::INVALID_ARGUMENT,
       [](v1::SharedGradients& m) {
         for (int i = 0; i < 100'000; ++i) m.add_chunks(0);
       }},
      {"another rank's chunk", Code::INVALID_ARGUMENT,
       [](v1::SharedGradients& m) { m.set_chunks(0, 1); }},
      {"unknown chunk", Code::INVALID_ARGUMENT, [](v1::SharedGradients& m) { m.set_chunks(0, 3); }},
      {"the largest chunk", Code::INVALID_ARGUMENT,
       [](v1::SharedGradients& m) { m.set_chunks(0, ~0u); }},
      {"a later step", Code::FAILED_PRECONDITION, [](v1::SharedGradients& m) { m.set_step(2); }},
      {"a micro-step left out", Code::FAILED_PRECONDITION,
       [](v1::SharedGradients& m) {
         m.set_micro_step_begin(1);
         m.set_micro_step_end(2);
       }},
      {"no micro-steps", Code::INVALID_ARGUMENT,
       [](v1::SharedGradients& m) { m.set_micro_step_end(0); }},
  };
  for (const auto& [what, code, spoil] : kCases) {
    SharingWorker worker(service_, "tiny", 0);
    worker.JoinAndOpenStream();
    worker.Begin(1);
    v1::TrainRequest message = SharingWorker::SharedGradients(1, {0}, 0, true);
    spoil(*message.mutable_shared_gradients());
    EXPECT_TRUE(worker.Write(message));
    ExpectRefused(worker.ReadUntilEnd(), code, what);
  }
}

TEST_F(MalformedSharedGradients, OfAWorkerWithoutMemoryAreRefused) {
  TestWorker worker(service_, "tiny", 0, Codec::kGenerated);
  ASSERT_TRUE(worker.Attach().ok());
  worker.OpenStream();
  worker.Begin(1);
  EXPECT_TRUE(worker.Write(SharingWorker::SharedGradients(1, {0}, 0, true)));
  ExpectRefused(worker.ReadUntilEnd(), grpc::StatusCode::FAILED_PRECONDITION, "gradients");

  grpc::ClientContext context;
  const auto stream = service_.train().Train(&context);
  v1::TrainRequest open;
  *open.mutable_open() = worker.OpenMessage();
  open.mutable_open()->set_weights_in_shared_memory(true);
  stream->Write(open);
  v1::TrainResponse response;
  EXPECT_FALSE(stream->Read(&response));
  ExpectRefused(stream->Finish(), grpc::StatusCode::FAILED_PRECONDITION, "weights");
}

// Writes anything into all these places, now and then a NaN, until it is stopped.
void Scribble(const std::vector<absl::Span<std::byte>>& places, const std::atomic<bool>& stop) {
  std::minstd_rand random(7);
  while (!stop) {
    for (const absl::Span<std::byte> place : places) {
      for (size_t i = 0; i + 2 <= place.size() && !stop; i += 2) {
        const uint16_t bits = random() % 4096 == 0 ? 0x7fc0 : random() % 0x7f00;
        std::memcpy(&place[i], &bits, 2);
      }
    }
  }
}

v1::Job SpeculatingJob(const std::string& name) {
  v1::Job job = TinyJob(name);
  job.set_update_mode(v1::SPECULATE);
  return job;
}

// The victim is another job of the same service.
class HostileSharedMemory : public MalformedInput {
 protected:
  void TrainVictim(int steps = 1) {
    for (int i = 0; i < steps; ++i) {
      SendStep(*victims_[0], *victims_[1], ++victim_step_);
      victims_[0]->ReadUntilCommitted();
      victims_[1]->ReadUntilCommitted();
    }
  }
  void OpenVictim() {
    CreateTinyJob(service_, "victim");
    for (const int rank : {0, 1}) {
      victims_.push_back(std::make_unique<TestWorker>(service_, "victim", rank, Codec::kFrames));
      ASSERT_TRUE(victims_.back()->Attach().ok());
      victims_.back()->OpenStream();
    }
  }
  static std::string UndisturbedHash(uint64_t steps) {
    ServiceForTests service;
    CreateTinyJob(service, "victim");
    TestWorker first(service, "victim", 0, Codec::kFrames);
    TestWorker second(service, "victim", 1, Codec::kFrames);
    for (TestWorker* worker : {&first, &second}) {
      EXPECT_TRUE(worker->Attach().ok());
      worker->OpenStream();
    }
    for (uint64_t step = 1; step <= steps; ++step) {
      SendStep(first, second, step);
      first.ReadUntilCommitted();
      second.ReadUntilCommitted();
    }
    return service.StateHash("victim");
  }

  std::vector<std::unique_ptr<TestWorker>> victims_;
  uint64_t victim_step_ = 0;
};

TEST_F(HostileSharedMemory, ThatChangesAllTheTimeHarmsOnlyItsOwnJob) {
  constexpr uint64_t kManySteps = 40;
  OpenVictim();
  for (const bool speculate : {false, true}) {
    const std::string name = speculate ? "speculating" : "waiting";
    CreateTinyJob(service_, name, speculate ? SpeculatingJob(name) : TinyJob(name));
    SharingWorker first(service_, name, 0), second(service_, name, 1);
    for (SharingWorker* worker : {&first, &second}) {
      if (speculate) worker->Speculate();
      worker->JoinAndOpenStream();
    }
    std::atomic<bool> stop = false;
    std::thread scribbler([&] { Scribble(first.used_places(), stop); });
    std::thread another([&] { Scribble(second.used_places(), stop); });
    for (uint64_t step = 1; step <= kManySteps; ++step) {
      for (SharingWorker* worker : {&first, &second}) worker->SendStepInPlace(step, 1);
      TrainVictim();
      // It may be applied or skipped, whatever was seen; it ends.
      first.ReadStepInPlace();
      second.ReadStepInPlace();
    }
    // Nor does it matter when padding is not zero: such a step is refused, if that is seen.
    std::thread padding([&] { Scribble({first.memory(), second.memory()}, stop); });
    for (SharingWorker* worker : {&first, &second}) worker->SendStepInPlace(kManySteps + 1, 1);
    TrainVictim(3);
    stop = true;
    for (std::thread* thread : {&scribbler, &another, &padding}) thread->join();
    ExpectAnswers(name);
  }
  EXPECT_EQ(service_.StateHash("victim"), UndisturbedHash(victim_step_));
}

// A process that writes to the memory, and nothing else, until it is killed.
pid_t StartScribbler(const v1::SharedMemoryOffer& offer, int ready) {
  const std::string name = offer.socket(), token = offer.token();
  const pid_t child = fork();
  if (child != 0) return child;
  SharedMemoryPeer peer(name);
  if (!peer.Say(token) || peer.Reply() != "G" || peer.memory().empty()) _exit(1);
  if (write(ready, "y", 1) != 1) _exit(1);
  const std::atomic<bool> never = false;
  Scribble({peer.memory()}, never);
  _exit(1);
}

TEST_F(HostileSharedMemory, OfAProcessThatIsKilledInMidWriteHarmsNoOtherProcess) {
  OpenVictim();
  CreateTinyJob(service_, "killed");
  uint64_t step = 0;
  for (int round = 0; round < 10; ++round) {
    // The child has rank 0's memory; its messages come from here.
    TestWorker rank_0(service_, "killed", 0, Codec::kFrames, "child " + std::to_string(round));
    rank_0.AskForSharedMemory();
    ASSERT_TRUE(rank_0.Attach().ok());
    int ready[2];
    ASSERT_EQ(pipe(ready), 0);
    const pid_t child = StartScribbler(rank_0.attachment().shared_memory(), ready[1]);
    char answer = 0;
    ASSERT_EQ(read(ready[0], &answer, 1), 1);
    close(ready[0]);
    close(ready[1]);
    SharingWorker rank_1(service_, "killed", 1);
    rank_1.Join();
    rank_0.OpenStream();
    rank_1.OpenStream();
    ++step;
    rank_0.Begin(step);
    rank_0.Send(SharingWorker::SharedGradients(step, {0}, 0, /*final=*/true));
    rank_0.EndMicroStep(step, 0);
    // The service drops the memory when the process dies, and then refuses gradients that it has not read.
    rank_0.ReadUntilAcknowledged();
    if (round % 2 == 0) kill(child, SIGKILL);
    rank_0.Seal(step, 1);
    rank_1.SendStepInPlace(step, 1);
    if (round % 2 == 1) kill(child, SIGKILL);
    TrainVictim();
    rank_1.ReadStepInPlace();
    rank_0.ReadUntilCommitted();
    ASSERT_EQ(waitpid(child, nullptr, 0), child);
  }
  EXPECT_EQ(service_.StateHash("victim"), UndisturbedHash(victim_step_));
}

}  // namespace
}  // namespace ballast::server
