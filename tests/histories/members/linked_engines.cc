#include "tests/histories/members/linked_engines.h"

#include <algorithm>
#include <chrono>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/job/members/words_codec.h"
#include "cpu_optimizer_service/state/checkpoint_directory.h"
#include "tests/histories/members/mortal_files.h"

namespace ballast::histories {

// Both ends of one.
struct LinkedEngines::Link {
  Link(std::shared_ptr<Job> leads, int of) : job(std::move(leads)), member(of) {}

  void End() {
    part.reset();
    if (job == nullptr) return;
    job->CloseLink(at_lead, absl::UnavailableError("the wire is cut"));
    job.reset();
  }

  std::shared_ptr<Job> job;                // The lead's end, and
  std::unique_ptr<Engine::PartLink> part;  // the member's; null: it has ended.
  const int member;
  uint64_t at_lead = 0;  // Its number there.
};

template <typename Word>
class LinkedEngines::Sink final : public WordSink<Word> {
 public:
  Sink(LinkedEngines& engines, std::deque<Action>& wire, DeathFlag dead,
       std::function<void(Word)> deliver)
      : engines_(engines), wire_(wire), dead_(std::move(dead)), deliver_(std::move(deliver)) {}

  // As bytes.
  void Send(Word word) override {
    if (dead_ != nullptr && *dead_) return;
    engines_.Put(wire_, [&spec = engines_.spec_, deliver = deliver_, bytes = Encode(word)] {
      if constexpr (std::is_same_v<Word, LeadWord>) {
        deliver(DecodeLeadWord(bytes, spec).value());
      } else {
        deliver(DecodeMemberWord(bytes, spec).value());
      }
    });
  }

 private:
  LinkedEngines& engines_;
  std::deque<Action>& wire_;
  const DeathFlag dead_;
  const std::function<void(Word)> deliver_;
};

class LinkedEngines::Dialer final : public MemberDialer {
 public:
  explicit Dialer(LinkedEngines& engines) : engines_(engines) {}

  void Dial(std::shared_ptr<Job> job) override {
    MutexLock lock(engines_.mutex_);
    engines_.actions_.push_back([this, weak = std::weak_ptr<Job>(job)] {
      for (int member = 0; member < engines_.members(); ++member) {
        if (member != engines_.spec_.lead()) engines_.Open(member, weak.lock());
      }
    });
    engines_.changed_.NotifyAll();
  }
  void HangUp(const Job& /*job*/) override {
    for (Side& side : engines_.sides_) {
      engines_.Put(side.to_member, [&side] {
        if (side.link != nullptr) side.link->End();
      });
    }
  }

 private:
  LinkedEngines& engines_;
};

LinkedEngines::LinkedEngines(JobSpec spec, uint64_t seed, int threads, FileSystem& files,
                             int victim)
    : spec_(std::move(spec)),
      threads_(threads),
      files_(files),
      victim_(victim),
      dialer_(std::make_unique<Dialer>(*this)),
      random_(seed),
      sides_(spec_.member_count()) {
  if (victim_ != -1) {
    deaths_ = std::make_unique<Deaths>();
    dead_ = deaths_->flag();
    deaths_->Notify([this] {
      MutexLock lock(mutex_);
      changed_.NotifyAll();
    });
  }
  for (int member = 0; member < members(); ++member) {
    sides_[member].host = std::make_unique<Host>();
    Start(member, /*dials=*/true);
    sides_[member].host->Begin(*sides_[member].engine, FlagOf(member));
  }
  thread_ = std::thread([this] { Run(); });
}

LinkedEngines::~LinkedEngines() {
  if (deaths_ != nullptr) deaths_->Hide();
  {
    MutexLock lock(mutex_);
    ended_ = true;
    changed_.NotifyAll();
  }
  thread_.join();
  for (Side& side : sides_) side.engine->UseDialer(nullptr);
  for (int member = 0; member < members(); ++member) Close(member);
  for (Side& side : sides_) side.engine.reset();
}

void LinkedEngines::Start(int member, bool dials) {
  Side& side = sides_[member];
  side.files = std::make_unique<MortalFiles>(files_, FlagOf(member));
  side.checkpoints = CheckpointDirectory::Open(*side.files, kSaved).value();
  if (member == victim_) memory_ = std::make_unique<NamedMemory>(deaths_->keeper());
  side.engine = std::make_unique<Engine>(
      EngineOptions{.memory_limit_bytes = int64_t{1} << 28,
                    .threads = threads_,
                    .named_memory = member == victim_ ? memory_.get() : nullptr,
                    .file_system = side.files.get(),
                    .checkpoints = side.checkpoints.get()});
  if (dials) side.engine->UseDialer(dialer_.get());
}

absl::Status LinkedEngines::Create() {
  return sides_[spec_.lead()].engine->CreateJob(spec_).status();
}

void LinkedEngines::Plan(std::vector<LinkCut> cuts) {
  MutexLock lock(mutex_);
  planned_ = std::move(cuts);
  for (Side& side : sides_) side.words = 0;
}

bool LinkedEngines::IsSettled() const {
  return !busy_ && actions_.empty() && !is_dead() &&
         std::all_of(sides_.begin(), sides_.end(), [](const Side& side) {
           return side.to_member.empty() && side.to_lead.empty();
         });
}

absl::Status LinkedEngines::Settle() {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  MutexLock lock(mutex_);
  while (!IsSettled()) {
    if (!changed_.WaitUntil(mutex_, deadline) && !IsSettled()) {
      return absl::UnavailableError("members have not come to rest");
    }
  }
  return fault_;
}

absl::StatusOr<std::shared_ptr<Job>> LinkedEngines::Part(int member) {
  return sides_[member].engine->FindJob(spec_.name);
}

int64_t LinkedEngines::words() const {
  MutexLock lock(mutex_);
  return words_;
}
int64_t LinkedEngines::cuts() const {
  MutexLock lock(mutex_);
  return cuts_;
}
int64_t LinkedEngines::deaths_seen() const {
  MutexLock lock(mutex_);
  return deaths_seen_;
}

// ---------------------------------------------------------------- the links' thread

void LinkedEngines::Put(std::deque<Action>& wire, Action deliver) {
  MutexLock lock(mutex_);
  wire.push_back(std::move(deliver));
  changed_.NotifyAll();
}

void LinkedEngines::Run() {
  while (Action act = Next()) {
    act();
    act = nullptr;  // And with it what it refers to.
    MutexLock lock(mutex_);
    busy_ = false;
    changed_.NotifyAll();
  }
}

LinkedEngines::Action LinkedEngines::Next() {
  MutexLock lock(mutex_);
  for (;;) {
    if (ended_) return nullptr;
    if (is_dead()) {
      busy_ = true;
      return [this] { TakeOver(); };
    }
    if (!actions_.empty()) {
      busy_ = true;
      Action next = std::move(actions_.front());
      actions_.pop_front();
      return next;
    }
    std::vector<std::pair<int, std::deque<Action>*>> full;
    for (int member = 0; member < members(); ++member) {
      Side& side = sides_[member];
      if (!side.to_member.empty()) full.emplace_back(member, &side.to_member);
      if (!side.to_lead.empty()) full.emplace_back(member, &side.to_lead);
    }
    if (!full.empty()) {
      const auto& chosen = full[random_.Below(static_cast<int>(full.size()))];
      const int member = chosen.first;
      std::deque<Action>* const wire = chosen.second;
      busy_ = true;
      const int word = sides_[member].words++;
      const auto cut = std::find_if(planned_.begin(), planned_.end(), [&](const LinkCut& each) {
        return each.member == member && each.word == word;
      });
      if (cut != planned_.end()) return [this, cut = *cut] { Cut(cut); };
      Action next = std::move(wire->front());
      wire->pop_front();
      ++words_;
      return next;
    }
    changed_.Wait(mutex_);
  }
}

// The lead's end first, as a stream is opened.
void LinkedEngines::Open(int member, const std::shared_ptr<Job>& job) {
  if (job == nullptr) return;
  Side& side = sides_[member];
  const auto link = std::make_shared<Link>(job, member);
  side.link = link;
  link->at_lead = job->OpenLinkToMember(
      member, std::make_shared<Sink<LeadWord>>(*this, side.to_member, FlagOf(spec_.lead()),
                                               [weak = std::weak_ptr<Link>(link)](LeadWord word) {
                                                 const auto here = weak.lock();
                                                 if (here != nullptr && here->part != nullptr)
                                                   here->part->Hear(std::move(word));
                                               }));
  auto part = side.engine->FollowLead(
      DecodeFollow(Encode(job->FollowOf(member))).value(), "",
      std::make_shared<Sink<MemberWord>>(
          *this, side.to_lead, FlagOf(member), [weak = std::weak_ptr<Link>(link)](MemberWord word) {
            const auto here = weak.lock();
            if (here == nullptr || here->job == nullptr) return;
            here->job->HearMember(here->member, here->at_lead, std::move(word));
          }));
  if (part.ok()) {
    link->part = *std::move(part);
  } else {
    MutexLock lock(mutex_);
    fault_.Update(Annotate(part.status(), absl::StrCat("member ", member, " does not follow")));
  }
}

// What is on wires goes without the lock, as it may be the last to refer to a link.
void LinkedEngines::Clear(Side& side) {
  std::deque<Action> to_member;
  std::deque<Action> to_lead;
  MutexLock lock(mutex_);
  to_member.swap(side.to_member);
  to_lead.swap(side.to_lead);
}

void LinkedEngines::Close(int member) {
  Side& side = sides_[member];
  Clear(side);
  if (side.link != nullptr) side.link->End();
  side.link = nullptr;
  Clear(side);
}

void LinkedEngines::Cut(const LinkCut& cut) {
  Side& side = sides_[cut.member];
  if (side.link == nullptr) return;
  const absl::StatusOr<std::shared_ptr<Job>> job = Part(spec_.lead());
  if (!job.ok()) return;
  {
    MutexLock lock(mutex_);
    ++cuts_;
  }
  if (cut.how == LinkCut::kSeen) Close(cut.member);
  if (cut.how == LinkCut::kUnseen) Clear(side);
  // The older link ends once all that is on its wires has arrived.
  const std::shared_ptr<void> end(nullptr, [before = side.link](void*) {
    if (before != nullptr) before->End();
  });
  Open(cut.member, *job);
  Put(side.to_member, [end] {});
  Put(side.to_lead, [end] {});
}

void LinkedEngines::TakeOver() {
  Side& side = sides_[victim_];
  for (int member = 0; member < members(); ++member) {
    if (member == victim_ || victim_ == spec_.lead()) Close(member);
  }
  side.host->End();
  do {
    {
      MutexLock lock(mutex_);
      ++deaths_seen_;
      actions_.clear();
    }
    side.engine->UseDialer(nullptr);
    side.engine.reset();
    memory_.reset();
    deaths_->Begin();
    {
      MutexLock lock(mutex_);
      dead_ = deaths_->flag();
    }
    Start(victim_, /*dials=*/false);
    deaths_->Expose();
    const Engine::TakenOver taken = side.engine->TakeOverJobs();
    if (deaths_->Hide()) continue;
    if (!taken.lost.empty()) {
      MutexLock lock(mutex_);
      fault_.Update(absl::InternalError(absl::StrCat("lost with the process: ", taken.lost[0])));
    }
  } while (*deaths_->flag());
  side.host->Begin(*side.engine, deaths_->flag());
  if (victim_ == spec_.lead()) {
    side.engine->UseDialer(dialer_.get());
  } else if (const auto job = Part(spec_.lead()); job.ok()) {
    Open(victim_, *job);
  }
}

}  // namespace ballast::histories
