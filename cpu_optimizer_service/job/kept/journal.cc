#include "cpu_optimizer_service/job/kept/journal.h"

#include <new>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/system/ordered_stores.h"
#include "cpu_optimizer_service/host/named_memory.h"

namespace ballast {

absl::Status Journal::Allocate() {
  if (core_.environment.named_memory == nullptr) return absl::OkStatus();
  if (kept_ != nullptr && kept_->taken_over()) {
    // As it was made, whatever there would be room for now.
    if (!kept_->arenas().Has("second versions")) memory_.need.speculation_bytes = 0;
  } else {
    kept_ = std::make_unique<KeptJob>(*core_.environment.named_memory, core_.identity);
  }
  // A loop's bodies run on all threads, and on that of its caller.
  return kept_->Allocate(static_cast<int64_t>(core_.layout.chunks().size()),
                         2 * core_.environment.tasks->threads() + 2);
}

void Journal::Keep() {
  ++changes_;
  if (kept_ == nullptr) return;
  std::vector<KeptJob::Rank> ranks(ranks_.size());
  for (int rank = 0; rank < ranks_.size(); ++rank) {
    const RankEntry& entry = ranks_[rank];
    // A rank's process may have let go of its memory, in which the step in progress still reads
    // gradients. Then a later process must find the lender.
    const auto& memory = entry.lender != nullptr ? entry.lender : entry.memory;
    ranks[rank] = {.last_process_id = entry.last_process_id,
                   .memory = memory == nullptr ? std::string() : std::string(memory->kept_name())};
  }
  if (absl::Status stored = kept_->Store(core_.record, core_.first_weights.complete(), ranks);
      !stored.ok()) {
    StopKeeping(stored);
  }
}

// Better than what the job was some time ago.
// A record that stays behind would have a later process go on from an older step, over chunks that
// are at a newer one.
void Journal::StopKeeping(const absl::Status& why) {
  // As where any other small allocation fails: this process ends, and the next one goes on from
  // what is kept.
  if (IsOutOfMemory(why)) {
    if (const std::new_handler handler = std::get_new_handler(); handler != nullptr) handler();
    throw std::bad_alloc();
  }
  kept_->GiveUp();
  if (!core_.environment.warn) return;
  // Without the job, which would keep itself where no section follows.
  core_.RunAfter([warn = core_.environment.warn,
                  line = absl::StrCat("job ", core_.spec().name,
                                      " would be lost with the service's process from now on: ",
                                      why.message(), "; save it")] { warn(line); });
}

void Journal::KeepWord(const StepWord& word) {
  if (kept_ == nullptr) return;
  if (absl::Status said = kept_->Say(core_.record.epoch, word); !said.ok()) StopKeeping(said);
}

void Journal::KeepContribution(const Contribution& given, uint64_t epoch) {
  if (kept_ == nullptr) return;
  kept_->StoreContribution(given.chunk,
                           {.epoch = epoch,
                            .attempt = given.attempt,
                            .next_micro_step = given.micro_step_end,
                            .closed = given.final,
                            .kept = memory_.gradients->kept(static_cast<int>(given.chunk))});
}

void Journal::KeepLost(const Contribution& given, uint64_t epoch) {
  kept_->StoreContribution(given.chunk, {.epoch = epoch,
                                         .attempt = given.attempt,
                                         .next_micro_step = given.micro_step_begin,
                                         .kept = GradientStore::Kept::kLost});
  // The word, then the first change of the sum.
  KeepOrderOfStores();
}

}  // namespace ballast
