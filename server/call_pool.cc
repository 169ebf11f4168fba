#include "server/call_pool.h"

#include "absl/strings/str_cat.h"

namespace ballast::server {

absl::StatusOr<CallPool::Place> CallPool::Enter() {
  // Counted first and compared then: with a look before, two callers could both get the last place.
  if (calls_.fetch_add(1) < most_calls_) return Place(this);
  --calls_;
  return absl::ResourceExhaustedError(absl::StrCat("the service already runs ", most_calls_, " ",
                                                   kind_, ", its maximum; try again later"));
}

bool CallPool::AnswerWaits(size_t bytes) {
  // As above. A call that is refused because of what another counts for a moment keeps its place,
  // which does no harm.
  if (unread_bytes_.fetch_add(bytes) + bytes <= kMaxUnreadBytes) return true;
  unread_bytes_ -= bytes;
  return false;
}

}  // namespace ballast::server
