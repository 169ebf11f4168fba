// A job over several engines of this process. Words between them wait on wires, from which a thread
// takes them in an order that a seed gives; each wire keeps its own order.
#ifndef BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_JOB_MEMBERS_CLUSTER_H_
#define BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_JOB_MEMBERS_CLUSTER_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/system/mutex.h"
#include "cpu_optimizer_service/engine.h"
#include "cpu_optimizer_service/host/named_memory.h"
#include "cpu_optimizer_service/job/members/words.h"
#include "cpu_optimizer_service/job/members/words_codec.h"
#include "tests/cpu_optimizer_service/job/job_driver.h"
#include "tests/cpu_optimizer_service/job/members/together.h"
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
  // What a member has more than others do.
  using Equip = std::function<void(int member, EngineOptions& options)>;
  // `homes`: by rank, the member. With `deaths` one member, the `victim`, may die.
  Cluster(JobSpec spec, const std::vector<int>& homes, uint32_t seed = 1,
          histories::Deaths* deaths = nullptr, int victim = -1,
          int64_t limit_bytes = int64_t{256} << 20, Equip equip = nullptr)
      : wires_(std::make_unique<Wires>(seed)),
        deaths_(deaths),
        victim_(victim),
        equip_(std::move(equip)) {
    const int count = 1 + *std::max_element(homes.begin(), homes.end());
    for (int m = 0; m < count; ++m) spec.members.push_back({"host" + std::to_string(m)});
    spec.homes = homes;
    spec_ = spec;
    for (int m = 0; m < count; ++m) {
      ends_.push_back({.to_member = wires_->Add(), .to_lead = wires_->Add()});
      engines_.push_back(Start(m, limit_bytes));
    }
    jobs_.resize(count);
    drivers_.resize(count);
  }
  ~Cluster() {
    drivers_.clear();
    for (const auto& engine : engines_) engine->UseDialer(nullptr);
    for (int m = 0; m < members(); ++m) CloseLink(m);
    wires_.reset();
    jobs_.clear();
  }

  absl::Status Create() {
    const absl::Status created = engines_[lead()]->CreateJob(spec_).status();
    for (int m = 0; m < members() && created.ok(); ++m) Adopt(m);
    return created;
  }
  // With the job, its weights, and all ranks.
  static std::unique_ptr<Cluster> Begun(JobSpec spec, const std::vector<int>& homes,
                                        uint32_t seed = 1, histories::Deaths* deaths = nullptr,
                                        int victim = -1, Equip equip = nullptr) {
    auto cluster = std::make_unique<Cluster>(std::move(spec), homes, seed, deaths, victim,
                                             int64_t{256} << 20, std::move(equip));
    EXPECT_EQ(cluster->Create(), absl::OkStatus());
    for (const auto& driver : cluster->drivers_) driver->UploadWeights();
    cluster->AwaitWords();
    for (const auto& driver : cluster->drivers_) driver->AttachAll();
    return cluster;
  }

  int lead() const { return spec_.lead(); }
  int members() const { return static_cast<int>(ends_.size()); }
  Engine& engine(int m) { return *engines_[m]; }
  JobDriver& member(int m) { return *drivers_[m]; }
  JobDriver& home(int rank) { return *drivers_[spec_.homes[rank]]; }
  Wires& wires() { return *wires_; }
  void AwaitWords() { wires_->AwaitEmpty(); }

  // The victim has died. The next process takes over what it left, with no rank attached.
  void TakeOver() {
    CutOffVictim();
    Restart();
    Adopt(victim_);
    if (victim_ == lead()) {
      engines_[victim_]->UseDialer(dialers_[victim_].get());
    } else {
      Relink(victim_);
    }
  }
  void CutOffVictim() {
    for (int m = 0; m < members(); ++m) {
      if (m == victim_ || victim_ == lead()) CloseLink(m);
    }
  }
  // The next process, which no link leads to yet.
  void Restart() {
    drivers_[victim_].reset();
    jobs_[victim_].reset();
    do {
      engines_[victim_]->UseDialer(nullptr);
      engines_[victim_].reset();
      memory_.reset();
      deaths_->Begin();
      engines_[victim_] = Start(victim_, int64_t{256} << 20, /*dials=*/false);
      deaths_->Expose();
      const Engine::TakenOver taken = engines_[victim_]->TakeOverJobs();
      if (!deaths_->Hide()) {
        ASSERT_THAT(taken.lost, testing::IsEmpty());
        break;
      }
    } while (true);
  }
  void Adopt(int m) {
    jobs_[m] = engines_[m]->FindJob(spec_.name).value();
    drivers_[m] = std::make_unique<JobDriver>(jobs_[m]);
  }
  // Plays the victim's deaths until `is_over`, and counts them. `ask` makes a call of the lead, and
  // calls what it gets with the answer: until that is OK, it is made again. Ends with Disarm.
  using Answered = std::function<void(const absl::Status&)>;
  void UntilOver(const std::function<bool()>& is_over, const std::function<void(Answered)>& ask,
                 int& deaths_seen) {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    auto asked = std::make_shared<std::atomic<bool>>(false);
    for (;;) {
      ASSERT_LT(std::chrono::steady_clock::now(), limit) << Describe();
      if (deaths_->Hide()) {
        ++deaths_seen;
        TakeOver();
        if (victim_ == lead()) asked = std::make_shared<std::atomic<bool>>(false);
      }
      if (is_over()) break;
      deaths_->Expose();
      if (!asked->exchange(true)) {
        ask([asked](const absl::Status& status) {
          if (!status.ok()) *asked = false;
        });
      }
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    deaths_->Disarm();
  }
  MemberDialer* dialer(int m) { return dialers_[m].get(); }
  Job& job(int m) { return *jobs_[m]; }

  // The link ends with what is on it, and a new one is opened.
  void Cut(int m) {
    CloseLink(m);
    Relink(m);
  }
  void Unlink(int m) { CloseLink(m); }
  // Nobody but the engines keeps the job.
  void Forget() {
    for (auto& driver : drivers_) driver.reset();
    for (auto& job : jobs_) job.reset();
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

  // For a failure: where each member stands.
  std::string Describe() {
    std::string text;
    for (int m = 0; m < members(); ++m) {
      const JobStatus status = job(m).Status();
      absl::StrAppend(&text, "member ", m, m == lead() ? ", the lead," : "", " at step ",
                      status.committed_step, " of ", ToString(status.generation), ", phase ",
                      static_cast<int>(status.phase), ";");
      for (const int rank : job(m).layout().ranks()) {
        const RankProgress& at = status.ranks[rank];
        absl::StrAppend(&text, " rank ", rank, " attempt ", at.attempt, at.begun ? " begun" : "",
                        " ended ", at.micro_steps_ended, at.sealed ? " sealed" : "",
                        at.voted ? " voted" : "");
      }
      absl::StrAppend(&text, "\n");
    }
    return text;
  }

  void ExpectStateOf(Job& whole) {
    std::vector<Job*> parts;
    for (const auto& job : jobs_) parts.push_back(job.get());
    ExpectTogether(parts, whole);
  }

 private:
  template <typename Word>
  class Sink : public WordSink<Word> {
   public:
    Sink(Wires& wires, int wire, const JobSpec& spec, histories::DeathFlag dead,
         std::function<void(Word)> deliver)
        : wires_(wires),
          wire_(wire),
          spec_(spec),
          dead_(std::move(dead)),
          deliver_(std::move(deliver)) {}
    // As bytes.
    void Send(Word word) override {
      if (dead_ != nullptr && *dead_) return;
      wires_.Put(wire_, [deliver = deliver_, &spec = spec_, bytes = Encode(word)] {
        if constexpr (std::is_same_v<Word, LeadWord>) {
          deliver(DecodeLeadWord(bytes, spec).value());
        } else {
          deliver(DecodeMemberWord(bytes, spec).value());
        }
      });
    }

   private:
    Wires& wires_;
    const int wire_;
    const JobSpec& spec_;
    const histories::DeathFlag dead_;
    const std::function<void(Word)> deliver_;
  };
  // Of a member that leads.
  class Dialer : public MemberDialer {
   public:
    explicit Dialer(Cluster& cluster) : cluster_(cluster) {}
    void Dial(std::shared_ptr<Job> job) override {
      for (int m = 0; m < cluster_.members(); ++m) {
        if (m != cluster_.lead()) cluster_.Link(job, m);
      }
    }
    // It may be called while a word is delivered.
    void HangUp(const Job& /*job*/) override {
      for (int m = 0; m < cluster_.members(); ++m) {
        const std::shared_ptr<OneLink> link = cluster_.LinkOf(m);
        if (link == nullptr) continue;
        cluster_.wires_->Put(cluster_.ends_[m].to_member, [link] { link->End(); });
      }
    }

   private:
    Cluster& cluster_;
  };

  histories::DeathFlag FlagOf(int m) const { return m == victim_ ? deaths_->flag() : nullptr; }
  std::unique_ptr<Engine> Start(int m, int64_t limit_bytes, bool dials = true) {
    if (m == victim_) memory_ = std::make_unique<NamedMemory>(deaths_->keeper());
    EngineOptions options = {.memory_limit_bytes = limit_bytes,
                             .threads = 2,
                             .named_memory = m == victim_ ? memory_.get() : nullptr,
                             .member_timeout_seconds = 0.5};
    if (equip_ != nullptr) equip_(m, options);
    auto engine = std::make_unique<Engine>(options);
    dialers_.resize(members());
    if (dialers_[m] == nullptr) dialers_[m] = std::make_unique<Dialer>(*this);
    if (dials) engine->UseDialer(dialers_[m].get());
    return engine;
  }

  // Both ends of one.
  struct OneLink {
    std::atomic<uint64_t> at_lead = 0;  // Its number there.

    explicit OneLink(std::shared_ptr<Job> of) : job_(std::move(of)) {}
    // The lead's, and the member's end; null: it has ended.
    std::shared_ptr<Job> job() {
      MutexLock lock(mutex_);
      return job_;
    }
    std::shared_ptr<Engine::PartLink> part() {
      MutexLock lock(mutex_);
      return part_;
    }
    void SetPart(std::shared_ptr<Engine::PartLink> part) {
      MutexLock lock(mutex_);
      part_ = std::move(part);
    }
    void End() {
      std::shared_ptr<Engine::PartLink> part;
      std::shared_ptr<Job> job;
      {
        MutexLock lock(mutex_);
        part.swap(part_);
        job.swap(job_);
      }
      part.reset();
      if (job != nullptr) job->CloseLink(at_lead, absl::UnavailableError("the wire is cut"));
    }

   private:
    Mutex mutex_;
    std::shared_ptr<Job> job_ ABSL_GUARDED_BY(mutex_);
    std::shared_ptr<Engine::PartLink> part_ ABSL_GUARDED_BY(mutex_);
  };
  struct Ends {
    int to_member = 0;  // Wires.
    int to_lead = 0;
    std::shared_ptr<OneLink> link = nullptr;
  };

  // The lead may hang up on any thread.
  std::shared_ptr<OneLink> LinkOf(int m) {
    MutexLock lock(links_mutex_);
    return ends_[m].link;
  }
  void SetLink(int m, std::shared_ptr<OneLink> link) {
    MutexLock lock(links_mutex_);
    ends_[m].link = std::move(link);
  }
  void CloseLink(int m) {
    const Ends& ends = ends_[m];
    const std::shared_ptr<OneLink> link = LinkOf(m);
    if (link == nullptr) return;
    wires_->Clear(ends.to_member);
    link->End();
    wires_->Clear(ends.to_lead);
    SetLink(m, nullptr);
  }
  void Relink(int m) { Link(engines_[lead()]->FindJob(spec_.name).value(), m); }
  // The lead's end first, as a stream is opened.
  void Link(std::shared_ptr<Job> job, int m) {
    const Ends& ends = ends_[m];
    const auto link = std::make_shared<OneLink>(job);
    SetLink(m, link);
    // A word may come before the member knows of its link.
    const auto is_there = std::make_shared<std::promise<void>>();
    link->at_lead =
        job->OpenLinkToMember(m, std::make_shared<Sink<LeadWord>>(
                                     *wires_, ends.to_member, spec_, FlagOf(lead()),
                                     [link, there = is_there->get_future().share()](LeadWord word) {
                                       there.wait();
                                       const auto part = link->part();
                                       if (part != nullptr) part->Hear(std::move(word));
                                     }));
    auto part = engines_[m]->FollowLead(
        DecodeFollow(Encode(job->FollowOf(m))).value(), "",
        std::make_shared<Sink<MemberWord>>(*wires_, ends.to_lead, spec_, FlagOf(m),
                                           [link, m](MemberWord word) {
                                             const auto of = link->job();
                                             if (of != nullptr)
                                               of->HearMember(m, link->at_lead, std::move(word));
                                           }));
    EXPECT_EQ(part.status(), absl::OkStatus());
    if (part.ok()) link->SetPart(*std::move(part));
    is_there->set_value();
  }

  JobSpec spec_;
  std::unique_ptr<Wires> wires_;
  histories::Deaths* const deaths_;
  const int victim_;
  const Equip equip_;
  std::unique_ptr<NamedMemory> memory_;  // The victim's.
  std::vector<std::unique_ptr<Dialer>> dialers_;
  std::vector<std::unique_ptr<Engine>> engines_;
  std::vector<std::shared_ptr<Job>> jobs_;
  std::vector<std::unique_ptr<JobDriver>> drivers_;
  std::vector<Ends> ends_;
  Mutex links_mutex_;  // Of the links of ends_.
};

// Cuts links of a cluster at any instants, as long as it lives.
class Cuts {
 public:
  Cuts(Cluster& cluster, uint32_t seed)
      : thread_([this, &cluster, turns = seed]() mutable {
          // They come more slowly in time: a machine that is slow, or has other work, goes on, too.
          for (int64_t cuts = 0; !ended_; ++cuts) {
            std::this_thread::sleep_for(
                std::chrono::microseconds(turns % 997 * (1 + cuts / kCutsAtFullSpeed)));
            turns = turns * 1664525u + 1013904223u;
            const int m = static_cast<int>((turns >> 8) % cluster.members());
            if (m != cluster.lead()) cluster.Cut(m);
          }
        }) {}
  ~Cuts() {
    ended_ = true;
    thread_.join();
  }

 private:
  static constexpr int64_t kCutsAtFullSpeed = 200;
  std::atomic<bool> ended_ = false;
  std::thread thread_;
};

// The same job on one host.
class OneHost {
 public:
  explicit OneHost(const JobSpec& spec) : driver_(engine_, spec) {
    driver_.UploadWeights();
    driver_.AttachAll();
  }
  JobDriver& operator*() { return driver_; }
  JobDriver* operator->() { return &driver_; }

 private:
  Engine engine_{{.memory_limit_bytes = int64_t{256} << 20, .threads = 2}};
  JobDriver driver_;
};

}  // namespace ballast

#endif  // BALLAST_TESTS_CPU_OPTIMIZER_SERVICE_JOB_MEMBERS_CLUSTER_H_
