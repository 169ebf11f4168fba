// A job over several engines of this process. Words between them wait on wires, from which a thread
// takes them in an order that a seed gives; each wire keeps its own order.
#ifndef BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_JOB_MEMBERS_CLUSTER_H_
#define BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_JOB_MEMBERS_CLUSTER_H_

#include <algorithm>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/engine.h"
#include "cpu_optimizer_service/host/named_memory.h"
#include "cpu_optimizer_service/job/members/words.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/histories/engine/deaths.h"

namespace ballast {

class Wires {
 public:
  explicit Wires(uint32_t seed) : random_(seed), thread_([this] { Run(); }) {}
  ~Wires() {
    {
      MutexLock lock(mutex_);
      ended_ = true;
      changed_.NotifyAll();
    }
    thread_.join();
  }

  using Deliver = std::function<void()>;
  int Add() {
    MutexLock lock(mutex_);
    wires_.emplace_back();
    return static_cast<int>(wires_.size()) - 1;
  }
  void Put(int wire, Deliver deliver) {
    MutexLock lock(mutex_);
    wires_[wire].push_back(std::move(deliver));
    changed_.NotifyAll();
  }
  // What is on it is lost; what has been taken from it has been delivered.
  void Clear(int wire) {
    MutexLock lock(mutex_);
    wires_[wire].clear();
    while (delivers_) changed_.Wait(mutex_);
  }
  // Until all that is on wires has been delivered.
  void AwaitEmpty() {
    MutexLock lock(mutex_);
    const auto is_empty = [](const std::deque<Deliver>& wire) { return wire.empty(); };
    while (delivers_ || !std::ranges::all_of(wires_, is_empty)) changed_.Wait(mutex_);
  }
  // Nothing is taken from wires meanwhile.
  void Hold(bool held) {
    MutexLock lock(mutex_);
    held_ = held;
    changed_.NotifyAll();
  }

 private:
  void Run() {
    while (Deliver deliver = Next()) {
      deliver();
      deliver = nullptr;  // And with it what it refers to.
      MutexLock lock(mutex_);
      delivers_ = false;
      changed_.NotifyAll();
    }
  }
  Deliver Next() {
    MutexLock lock(mutex_);
    while (true) {
      std::vector<std::deque<Deliver>*> full;
      for (auto& wire : wires_) {
        if (!wire.empty()) full.push_back(&wire);
      }
      if (ended_) return nullptr;
      if (!full.empty() && !held_) {
        std::deque<Deliver>& wire = *full[random_() % full.size()];
        Deliver next = std::move(wire.front());
        wire.pop_front();
        delivers_ = true;
        return next;
      }
      changed_.Wait(mutex_);
    }
  }

  Mutex mutex_;
  CondVar changed_;
  std::mt19937 random_;
  std::deque<std::deque<Deliver>> wires_;
  bool held_ = false;
  bool delivers_ = false;
  bool ended_ = false;
  std::thread thread_;
};

class Cluster {
 public:
  // `homes`: by rank, the member. With `deaths` one member, the `victim`, may die.
  Cluster(JobSpec spec, const std::vector<int>& homes, uint32_t seed = 1,
          histories::Deaths* deaths = nullptr, int victim = -1)
      : wires_(std::make_unique<Wires>(seed)), deaths_(deaths), victim_(victim) {
    const int count = 1 + *std::max_element(homes.begin(), homes.end());
    for (int m = 0; m < count; ++m) spec.members.push_back({"host" + std::to_string(m)});
    spec.homes = homes;
    spec_ = spec;
    for (int m = 0; m < count; ++m) {
      engines_.push_back(Start(m));
      jobs_.push_back(Await<std::shared_ptr<Job>>([&](Done<std::shared_ptr<Job>> done) {
                        engines_[m]->CreateJob(spec, {}, {.member = m, .uid = std::string(32, 'a')},
                                               std::move(done));
                      }).value());
      drivers_.push_back(std::make_unique<JobDriver>(jobs_[m]));
      ends_.push_back({.to_member = wires_->Add(), .to_lead = wires_->Add()});
    }
    for (int m = 0; m < count; ++m) {
      if (m != lead()) Link(m);
    }
    for (const auto& driver : drivers_) driver->UploadWeights();
    for (const auto& driver : drivers_) driver->AttachAll();
  }
  ~Cluster() {
    drivers_.clear();
    for (int m = 0; m < static_cast<int>(jobs_.size()); ++m) CloseLink(m);
    wires_.reset();
  }

  int lead() const { return spec_.lead(); }
  int members() const { return static_cast<int>(drivers_.size()); }
  JobDriver& member(int m) { return *drivers_[m]; }
  JobDriver& home(int rank) { return *drivers_[spec_.homes[rank]]; }
  Wires& wires() { return *wires_; }
  void AwaitWords() { wires_->AwaitEmpty(); }

  // The victim has died. The next process takes over what it left, with no rank attached.
  void TakeOver() {
    for (int m = 0; m < members(); ++m) {
      if (m == victim_ || victim_ == lead()) CloseLink(m);
    }
    drivers_[victim_].reset();
    jobs_[victim_].reset();
    do {
      engines_[victim_].reset();
      memory_.reset();
      deaths_->Begin();
      engines_[victim_] = Start(victim_);
      deaths_->Expose();
      const Engine::TakenOver taken = engines_[victim_]->TakeOverJobs();
      if (!deaths_->Hide()) {
        ASSERT_THAT(taken.lost, testing::IsEmpty());
        break;
      }
    } while (true);
    jobs_[victim_] = engines_[victim_]->FindJob(spec_.name).value();
    drivers_[victim_] = std::make_unique<JobDriver>(jobs_[victim_]);
    for (int m = 0; m < members(); ++m) {
      if (m != lead() && (m == victim_ || victim_ == lead())) Link(m);
    }
  }
  Job& job(int m) { return *jobs_[m]; }

  // The link ends with what is on it, and a new one is opened.
  void Cut(int m) {
    CloseLink(m);
    Link(m);
  }

  template <typename Do>
  void ForAll(Do&& work) {
    for (const auto& driver : drivers_) work(*driver);
  }
  // A rank of each member after the other, up to the last seal.
  void Give(uint64_t seed, uint32_t micro_steps = 1, const StepSettings& settings = {}) {
    ForAll([&](JobDriver& each) { each.BeginAll(settings); });
    for (uint32_t m = 0; m < micro_steps; ++m) {
      ForAll([&](JobDriver& each) {
        each.SendAll(seed + m, m, m + 1 == micro_steps);
        each.EndMicroStepAll(m);
      });
    }
  }
  void Seal(uint32_t micro_steps, const std::optional<StepVote>& vote) {
    for (int rank = 0; rank < spec_.layout.world_size; ++rank) {
      EXPECT_EQ(home(rank).SealWith(rank, micro_steps, vote), std::nullopt);
    }
  }
  StepOutcome AwaitCommit(uint64_t step) {
    for (int rank = 0; rank < spec_.layout.world_size; ++rank) {
      home(rank).listener(rank).WaitForCommit(step);
    }
    return home(0).listener(0).outcomes().back();
  }
  StepOutcome Step(uint64_t step, uint64_t seed, uint32_t micro_steps = 1,
                   const StepSettings& settings = {}, const StepVote& vote = {}) {
    Give(seed, micro_steps, settings);
    Seal(micro_steps, vote);
    return AwaitCommit(step);
  }

  // Whether the members' parts are together the state of `whole`, bit for bit.
  void ExpectStateOf(Job& whole) {
    std::vector<int> all;
    for (size_t p = 0; p < spec_.layout.parameters.size(); ++p) {
      if (spec_.layout.parameters[p].trainable) all.push_back(static_cast<int>(p));
    }
    const Snapshot expected = whole.TakeSnapshot(all).value();
    int64_t compared = 0;
    for (int m = 0; m < members(); ++m) {
      const Layout& layout = jobs_[m]->layout();
      const Snapshot here = jobs_[m]->TakeSnapshot(all).value();
      ASSERT_EQ(here.step(), expected.step());
      for (int chunk = 0; chunk < static_cast<int>(layout.chunks().size()); ++chunk) {
        layout.VisitPieces(chunk, [&](const ChunkPiece& piece) {
          for (const Plane plane : {Plane::kMaster, Plane::kExpAvg, Plane::kExpAvgSq}) {
            std::vector<float> mine(piece.elements);
            std::vector<float> theirs(piece.elements);
            here.Read(piece.parameter, plane, piece.parameter_offset, absl::MakeSpan(mine));
            expected.Read(piece.parameter, plane, piece.parameter_offset, absl::MakeSpan(theirs));
            ASSERT_EQ(mine, theirs) << "member " << m << ", parameter " << piece.parameter;
          }
          compared += piece.elements;
        });
      }
      for (const int p : all) ASSERT_EQ(here.update_count(p), expected.update_count(p));
    }
    int64_t elements = 0;
    for (const int p : all) elements += whole.layout().place(p).elements;
    ASSERT_EQ(compared, elements);
  }

 private:
  template <typename Word>
  class Sink : public WordSink<Word> {
   public:
    Sink(Wires& wires, int wire, histories::DeathFlag dead, std::function<void(Word)> deliver)
        : wires_(wires), wire_(wire), dead_(std::move(dead)), deliver_(std::move(deliver)) {}
    void Send(Word word) override {
      if (dead_ != nullptr && *dead_) return;
      wires_.Put(wire_, [deliver = deliver_, word = std::move(word)] { deliver(word); });
    }

   private:
    Wires& wires_;
    const int wire_;
    const histories::DeathFlag dead_;
    const std::function<void(Word)> deliver_;
  };
  histories::DeathFlag FlagOf(int m) const { return m == victim_ ? deaths_->flag() : nullptr; }
  std::unique_ptr<Engine> Start(int m) {
    if (m == victim_) memory_ = std::make_unique<NamedMemory>(deaths_->keeper());
    return std::make_unique<Engine>(
        EngineOptions{.memory_limit_bytes = int64_t{256} << 20,
                      .threads = 2,
                      .named_memory = m == victim_ ? memory_.get() : nullptr});
  }

  struct Ends {
    int to_member = 0;  // Wires.
    int to_lead = 0;
    uint64_t at_lead = 0;  // Links' numbers.
    uint64_t at_member = 0;
  };

  void CloseLink(int m) {
    // One that could not be taken over is not there.
    if (jobs_[lead()] != nullptr) jobs_[lead()]->CloseLink(ends_[m].at_lead);
    if (jobs_[m] != nullptr) jobs_[m]->CloseLink(ends_[m].at_member);
    wires_->Clear(ends_[m].to_member);
    wires_->Clear(ends_[m].to_lead);
  }
  // The lead's end first, as a stream is opened.
  void Link(int m) {
    Ends& ends = ends_[m];
    // A word may come before its link has a number here.
    const auto at_lead = std::make_shared<std::promise<uint64_t>>();
    const auto at_member = std::make_shared<std::promise<uint64_t>>();
    const auto lead_number = at_lead->get_future().share();
    const auto member_number = at_member->get_future().share();
    ends.at_lead = jobs_[lead()]->OpenLinkToMember(
        m, std::make_shared<Sink<LeadWord>>(*wires_, ends.to_member, FlagOf(lead()),
                                            [job = jobs_[m], member_number](LeadWord word) {
                                              job->HearLead(member_number.get(), std::move(word));
                                            }));
    at_lead->set_value(ends.at_lead);
    ends.at_member = jobs_[m]->OpenLinkToLead(std::make_shared<Sink<MemberWord>>(
        *wires_, ends.to_lead, FlagOf(m), [job = jobs_[lead()], m, lead_number](MemberWord word) {
          job->HearMember(m, lead_number.get(), std::move(word));
        }));
    at_member->set_value(ends.at_member);
  }

  JobSpec spec_;
  std::unique_ptr<Wires> wires_;
  histories::Deaths* const deaths_;
  const int victim_;
  std::unique_ptr<NamedMemory> memory_;  // The victim's.
  std::vector<std::unique_ptr<Engine>> engines_;
  std::vector<std::shared_ptr<Job>> jobs_;
  std::vector<std::unique_ptr<JobDriver>> drivers_;
  std::vector<Ends> ends_;
};

}  // namespace ballast

#endif  // BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_JOB_MEMBERS_CLUSTER_H_
